"""Who owns which block of the device pool: accounting only, no tensor, no IO, no clock.

Read in this order: `block_pool` (blocks and their owners), `node` and `eviction` (an edge of the tree, and which
leaf goes first), `radix` (the index of cached prefixes; its invariants in `integrity`), `sequence` (what one request
owns), `manager` (the one door through which the engine uses all of them). Nothing here decides *when*; that is the
engine's.
"""
