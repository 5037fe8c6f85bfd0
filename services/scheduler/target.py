"""What a clear means: from what a person asks for to a scope of blocks."""

from dataclasses import dataclass

from shared.identity import namespace_salt
from shared.identity import root as root_of
from shared.messages.base import unpack_u32
from shared.messages.engine import KVFacts
from shared.messages.store import ClearCache
from shared.scope import EVERYTHING, Scope, of_line, of_parts


class NoTarget(ValueError):
    """Nothing can be cleared by what was asked; the text says why, and what to do."""


@dataclass(frozen=True)
class Target:
    """What is cleared; `first`: of a line, the tokens of its first block, packed u32."""

    scope: Scope = EVERYTHING
    first: bytes = b""


def target_of(asked: ClearCache, key: bytes, facts: KVFacts | None) -> Target:
    """NoTarget when `asked` needs a worker that there is not, or a longer prefix."""
    salt = namespace_salt(key, asked.principal, asked.cache_salt)
    if asked.what == "all":
        return Target()
    if asked.what in ("tenant", "salt"):
        return Target(of_parts(key, salt=salt, whole_tenant=asked.what == "tenant"))
    if facts is None:
        raise NoTarget("no worker has loaded a model yet, so its blocks have no names here; try again when it has")
    if asked.what == "model":
        return Target(of_parts(key, fingerprint=facts.fingerprint))
    try:
        tokens = unpack_u32(asked.ids)
    except ValueError as error:
        raise NoTarget(f"ids: {error}") from error
    if len(tokens) < facts.block_tokens:
        short = facts.block_tokens - len(tokens)
        raise NoTarget(
            f"the prefix is {len(tokens):,} tokens; the cache holds blocks of {facts.block_tokens:,}; "
            f"give {short:,} more"
        )
    first = asked.ids[: 4 * facts.block_tokens]
    return Target(of_line(key, root_of(key, facts.fingerprint, salt=salt), first), first)
