"""Which cached blocks a clear means: by the parts of their root, and perhaps one line of prompts among them.

The one who clears makes a scope with the home's key; the store compares bytes and knows of no model or tenant.
"""

import msgspec

from shared.identity import (
    IDENTITY_BYTES,
    MODEL,
    SALT,
    TENANT,
    child,
    model_part,
    salt_part,
    tenant_part,
)


class Scope(msgspec.Struct, frozen=True, array_like=True):
    """Blocks whose root equals `pattern` in the bits of `mask`, 32 bytes each; both empty: all blocks.

    `line`: of these, the block of this identity, which is the first of its chain, and all blocks that continue it.
    """

    mask: bytes = b""
    pattern: bytes = b""
    line: bytes = b""

    def covers(self, root: bytes) -> bool:
        """Whether blocks of a root may be meant."""
        mask = int.from_bytes(self.mask, "little")
        return not (int.from_bytes(root, "little") ^ int.from_bytes(self.pattern, "little")) & mask

    def fault(self) -> str:
        """What is wrong with one that came over a socket; "" for nothing."""
        if len(self.mask) != len(self.pattern) or len(self.mask) not in (0, IDENTITY_BYTES):
            return f"a mask of {len(self.mask)} and a pattern of {len(self.pattern)} bytes are no scope"
        if len(self.line) not in (0, IDENTITY_BYTES):
            return f"an identity has {IDENTITY_BYTES} bytes, this line {len(self.line)}"
        if self.line and self.mask != b"\xff" * IDENTITY_BYTES:
            return "a line lies in one root"
        return ""


EVERYTHING = Scope()


def of_parts(key: bytes, *, fingerprint: bytes = b"", salt: bytes | None = None, whole_tenant: bool = False) -> Scope:
    """All roots of a fingerprint, if given, and of a namespace's salt, if given; or of all that its tenant has."""
    mask, pattern = bytearray(IDENTITY_BYTES), bytearray(IDENTITY_BYTES)
    parts: list[tuple[slice, bytes]] = []
    if fingerprint:
        parts.append((MODEL, model_part(key, fingerprint)))
    if salt is not None:
        parts.append((TENANT, tenant_part(key, salt)))
        if not whole_tenant:
            parts.append((SALT, salt_part(key, salt)))
    for where, part in parts:
        mask[where] = b"\xff" * len(part)
        pattern[where] = part
    return Scope(bytes(mask), bytes(pattern)) if parts else EVERYTHING


def of_root(root: bytes) -> Scope:
    """One namespace."""
    return Scope(b"\xff" * IDENTITY_BYTES, root)


def of_line(key: bytes, root: bytes, first_block: bytes) -> Scope:
    """All prompts of a namespace that begin with these tokens, packed u32: one full block."""
    return Scope(b"\xff" * IDENTITY_BYTES, root, child(key, root, first_block))
