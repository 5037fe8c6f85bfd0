"""`make fuzz`: every decoder of bytes that others wrote, fed with what our own encoders make and then bent.

Owns the mutators, the targets and the bounded runs of them. Never part of a running stack, and no coverage tool: the
mutators know the formats (they seal a bent record with its right checksum again), which reaches further than luck.

Read in this order: `mutate` (bytes), `values` (msgpack and JSON), `target` (what a target is), the targets
(`wire`, `journal`, `store`, `models`, `templates`, `home`, `keys`), `child` (runs them, under limits), `__main__`
(watches it and reports).
"""
