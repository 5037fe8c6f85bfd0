"""The disk tier: segment files with the blocks' bytes, and the index that says what lies where.

Owns every file of the tier, its format, its checks, and what a damaged or full disk means. Never decides what is
written or evicted, and knows nothing of engines, leases or the host tier.

Read in this order: `tier` (the one door; `block`, `errors` and `troubles` are its vocabulary, `tier_place` and
`pending` its parts), `segments` over `segment_set`, `segment_file`, `slot_io`, `slot_space`, `room`, `footer` and
`scratch` (the bytes), `index` over `row_table`, `index_place`, `index_record`, `lmdb_file` and `gate` (the index),
`meta_file`, and `recovery` and `survey` (telling what lies there after a start, and at any time).
"""
