"""The KV store daemon: host tier (arena in shared memory) and disk tier of every engine of the node.

Owns which block lies where, who may touch a slot, what is evicted, and what is still there after any death. Knows
nothing of requests, tokens or models, and never looks into a block's bytes beyond their checksum.
"""
