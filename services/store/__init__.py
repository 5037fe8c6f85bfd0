"""The KV store daemon: host tier (arena in shared memory) and disk tier of every engine of the node.

Owns which block lies where, who may touch a slot, what is evicted, and what is still there after any death. Knows
nothing of requests, tokens or models, and never looks into a block's bytes beyond their checksum.

`catalog` decides and is pure; `arena` and `disk` are the two tiers' bytes. The shell on top joins them: `opening`
brings all three up, `actor` takes the messages (`requests` unpacks them), `stager` moves disk to arena, `disk_lane`
arena to disk, `snapshot` shows what there is.
"""
