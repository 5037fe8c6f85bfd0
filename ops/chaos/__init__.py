"""Kills, stops and starves a real stack under load, and shows that nothing is lost: `python -m ops.chaos`.

`schedule` and `mix` are pure: what is struck, and what is asked, follow from the seed. `customers` ask and judge each
answer at once, `assault` strikes, `inspection` looks at what is left, `campaign` runs all of it.
"""
