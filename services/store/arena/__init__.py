"""The arena: the host tier's bytes and header tables, in shared memory that outlives every process.

Owns the file, its size, its format and the headers' records. Never decides what a slot holds or who may have it: the
catalogue does, and writes that down in the headers.

Read in this order: `records` (the format), `headers` (the tables), `size` (how large it may be), `arena` (the file).
"""
