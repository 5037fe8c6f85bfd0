"""The exactness matrix: the same prompts under every circumstance that must not change a bit.

Owns the plan of circumstances and the comparison; never decides what is equal enough: equal is equal.
"""
