"""The small files of a home: configuration and environment, keys, counters, notes."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import crc32c

from ops.fuzz.mutate import bent
from ops.fuzz.target import Target, joined, parted, same
from ops.supervise.incarnation import next_incarnation
from services.store.disk.errors import DiskTierError
from services.store.disk.index_place import IndexPlace
from services.store.disk.meta_file import MetaFile, packed
from shared.config import Config, ConfigError, load_config
from shared.faults import Faults
from shared.fileio import FileIO
from shared.identity import KeyDamaged, load_or_create_key

_TOML = (
    b'[model]\nsource = "toy:7"\nthreads = 2\n',
    b'[kv]\npool_bytes = "1.5 GiB"\ndtype = "bf16"\nprefix_cache = false\n',
    b"[scheduler]\nstep_tokens = 64\nlookup_s = 0.25\n[store]\nhost_bytes = 0\ndisk_floor = 0.1\n",
    b'[faults]\nretract_every = 3\n[faults.hooks]\nstore_before_data = "exit:3"\nworker_in_load = "delay:0.5"\n',
    b"",
)
_ENVIRONMENT = (
    b"PERDURE_KV__POOL_BYTES=2 GiB",
    b"PERDURE_SCHEDULER__GRACE_S=1e3",
    b"PERDURE_FAULTS__HOOKS__STORE_IN_DELETE=fail:2",
    b"PERDURE_HOME=/tmp",
)


def _config_seeds(rng: Random) -> list[bytes]:
    return [joined([toml, b"\n".join(rng.sample(_ENVIRONMENT, 2))]) for toml in _TOML for _ in range(2)]


def _config(data: bytes, place: Path) -> bool:
    toml, environment = parted(data, 2)
    path = place / "perdure.toml"
    path.write_bytes(toml)
    lines = environment.replace(b"\0", b"").decode(errors="surrogateescape").split("\n")  # as os.environ has them
    environ = {name: value for name, _, value in (line.partition("=") for line in lines)}
    try:
        config = load_config(path, environ)
        Faults(config.faults)
    except ConfigError as error:
        same(bool(str(error)), "a refusal without words")
        return False
    same(isinstance(config, Config), "no configuration")
    return True


def _config_bend(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    parts = parted(data, 2)
    which = rng.randrange(2)
    parts[which] = bent(parts[which], rng, [*_TOML, *_ENVIRONMENT])
    return joined(parts)


def _file_seeds(rng: Random) -> list[bytes]:
    return [rng.randbytes(32), b"17\n", b"1\n", b"clean", b"2", b""]


def _small_files(data: bytes, place: Path) -> bool:
    """The same bytes as an identity key, as a counter, and as notes beside the index."""
    counter = place / "store"
    counter.write_bytes(data)
    first = next_incarnation(place, "store")
    same(first > 0 and next_incarnation(place, "store") == first + 1, f"a counter that goes from {first} anywhere")
    index = place / "index"
    index.mkdir()
    (index / "data.mdb").write_bytes(b"")
    for note in ("scanning", "boot"):
        (index / note).write_bytes(data)
    notes = IndexPlace(index, FileIO())
    same(notes.distrust() is not None, "an empty index is trusted")
    notes.scan_begins()
    notes.scan_ends()
    key = place / "identity.key"
    key.write_bytes(data)
    try:
        return load_or_create_key(key) == data
    except KeyDamaged:
        return False


def _meta_seeds(rng: Random) -> list[bytes]:
    return [packed({"epoch": rng.randbytes(8), "starts": bytes(8)}), packed({})]


def _meta_bend(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    if rng.random() < 0.3:
        return bent(data, rng, corpus)
    body = bent(data[4:], rng, [other[4:] for other in corpus])
    return crc32c.crc32c(body).to_bytes(4, "little") + body


def _meta(data: bytes, place: Path) -> bool:
    (place / "meta").write_bytes(data)
    meta = MetaFile(place / "meta", FileIO())
    known = dict(meta.values)
    try:
        meta.put({"epoch": b"1"})
    except DiskTierError:
        return False
    again = MetaFile(place / "meta", FileIO())
    same(again.values == {**known, "epoch": b"1"}, "small records change when they are written again")
    return not meta.damaged


TARGETS = [
    Target("config", _config_seeds, _config, _config_bend),
    Target("small-files", _file_seeds, _small_files),
    Target("meta", _meta_seeds, _meta, _meta_bend),
]
