"""Whether the fields of a message fit each other: what types can't say, checked before the engine sees it.

The engine trusts what it is given (an exception inside it would end the scheduler), so nothing that merely decodes
may reach it. Each function returns "" or what is wrong.
"""

from shared.messages.base import IDENTITY_BYTES
from shared.messages.engine import Submit, Transferred, WorkerReady
from shared.messages.store import Found, Reserved, Staged


def submit_fault(message: Submit) -> str:
    """A Submit: packed ids, a digest of 32 bytes, ids of a sane length."""
    if len(message.ids) % 4:
        return f"ids has {len(message.ids)} bytes, no multiple of 4"
    if len(message.digest) != 32:
        return f"digest has {len(message.digest)} bytes, not 32"
    if not 1 <= len(message.id) <= 256:
        return f"id has {len(message.id)} characters; 1 to 256 are taken"
    return ""


def ready_fault(message: WorkerReady) -> str:
    """A WorkerReady: sizes that there can be."""
    facts = message.kv
    if len(facts.fingerprint) != IDENTITY_BYTES:
        return f"fingerprint has {len(facts.fingerprint)} bytes, not {IDENTITY_BYTES}"
    sizes = {"blocks": facts.blocks, "block_tokens": facts.block_tokens, "block_bytes": facts.block_bytes}
    for name, size in (sizes | {"max_context": message.max_context, "vocab": message.vocab}).items():
        if not 1 <= size < 1 << 31:
            return f"{name} is {size}"
    return ""


def found_fault(message: Found, asked: int) -> str:
    """A Found, as answer to `asked` identities."""
    n = len(message.tiers)
    if n > asked:
        return f"{n} blocks found, {asked} asked for"
    return _lengths(n, message.slots, message.offsets, message.generations, message.checksums)


def staged_fault(message: Staged) -> str:
    """A Staged."""
    if message.first < 0:
        return f"first is {message.first}"
    return _lengths(len(message.slots) // 4, message.slots, message.offsets, message.generations, message.checksums)


def reserved_fault(message: Reserved) -> str:
    """A Reserved."""
    return _lengths(len(message.status), message.slots, message.offsets, message.generations)


def transferred_fault(message: Transferred, copies: int) -> str:
    """A Transferred, as answer to `copies` copies."""
    if len(message.ok) != copies:
        return f"{len(message.ok)} outcomes of {copies} copies"
    return "" if len(message.checksums) == 8 * copies else f"{len(message.checksums)} bytes of {copies} checksums"


def _lengths(blocks: int, slots: bytes, *wide: bytes) -> str:
    if len(slots) != 4 * blocks or any(len(blob) != 8 * blocks for blob in wide):
        return f"{blocks} blocks with {len(slots)} bytes of slots and {[len(blob) for blob in wide]} of the others"
    return ""
