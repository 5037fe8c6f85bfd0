"""The worker owns the device and the page store: it executes the scheduler's plans, and decides nothing.

    socket ──► actor (event loop) ──Plan──► compute lane: steps ──► runner ──► sampler
                    │                                          └──► page store (KV pool)
                    └──Transfer──► copy lane: transfer ──► arena map (the store's shared memory) ◄──► page store

It never chooses a block, a row or a slot, and keeps no request: what it knows of one is in the plan's row.
"""
