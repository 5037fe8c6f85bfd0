"""What names one very arena file: its device and inode, and the random bytes that its store wrote into it.

A path does not: a file can go and another take its name. Nor does an inode number alone: they come back.
"""

import os

NONCE_AT = 40
"""Byte offset in the file."""
NONCE_BYTES = 16


def arena_key(fd: int) -> str:
    """The key of an open file, whatever it is; OSError of the kernel."""
    facts = os.fstat(fd)
    return f"{facts.st_dev:x}-{facts.st_ino:x}-{os.pread(fd, NONCE_BYTES, NONCE_AT).hex()}"
