"""Files of CURVE keys: the server's, a client's credential, the list of those who may come in."""

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec

from ops.fuzz.mutate import bent
from ops.fuzz.target import Target, same
from ops.fuzz.values import bent_value
from shared.curve.allowed import AllowedKey, read_allowed, write_allowed
from shared.curve.keys import ClientKey, KeyFileError, is_key, load_client_key, load_server_key

_KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
"""A key that protects nothing: the one of ZeroMQ's own documentation."""


def _seeds(rng: Random) -> list[bytes]:
    client = msgspec.json.encode(ClientKey(user="ann", public=_KEY, secret=_KEY, server=_KEY))
    server = msgspec.json.encode({"public": _KEY, "secret": _KEY})
    allowed = [AllowedKey(user=user, public=_KEY, added="2026-01-02T03:04:05Z") for user in ("ann", "bob.b")]
    return [client, server, msgspec.json.encode({"keys": allowed[:1], "version": 1})]


def _check(data: bytes, place: Path) -> bool:
    """As each of the three kinds; what is taken holds keys and nothing else."""
    path = place / "keys"
    path.write_bytes(data)
    os.chmod(path, 0o600)
    taken = 0
    for load in (load_client_key, load_server_key):
        try:
            pair = load(path)
        except KeyFileError as error:
            same(bool(str(error)), "a refusal without words")
            continue
        same(is_key(pair.public), "a key that is none")
        taken += 1
    try:
        keys = read_allowed(path)
    except KeyFileError:
        return bool(taken)
    write_allowed(place / "again", keys)
    same(read_allowed(place / "again") == keys, "a list of keys is another after a round trip")
    return True


def _bend(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    if rng.random() < 0.5:
        return bent(data, rng, corpus)
    return msgspec.json.encode(bent_value(msgspec.json.decode(data), rng))


TARGETS = [Target("key-files", _seeds, _check, _bend)]
