"""The catalogue: which block is where on both tiers, for whom, and what may happen next. Pure and deterministic.

Owns the rows of all blocks, their pins, leases, orders of recency and slots, and the state they have after a restart.
Its only lasting trace is the arena's header tables. Never touches a payload, a file, a thread or a clock: it says
what is to be moved, others move it and tell it the outcome.

Read in this order: `identity_table`, `order` and `entries` (the packed rows), `slots` (the host tier's room), `blocks`
(pins, recency, eviction), `staging`, `leases` and `behind` (loads, write-behind), `catalog` (the one door), then
`clearing`, `recovery` with `rebuild`, and `integrity` (what must hold at all times).
"""
