"""A small home that stands still, made by the real store, journal and ledger, and ways to damage it."""

import gc
import os
import shutil
import sqlite3
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from ops.doctor.exam import examine, repair
from ops.doctor.report import Report
from services.scheduler.journal import Journal
from services.scheduler.ledger import Ledger
from services.scheduler.records import AnyRecord
from services.store.arena.arena import open_arena
from services.store.arena.records import HOME_AT, pack_home
from services.store.disk.footer import PAGE
from services.store.disk.index import DiskIndex
from services.store.disk.index_record import Entry
from services.store.disk.segment_file import parse_name
from shared.config import Config
from shared.fileio import FileIO
from shared.identity import load_or_create_key
from shared.paths import Places
from tests.journal_kit import history
from tests.service.store_kit import SLOT, config, names, root_of, store

ROOT = root_of("m")
BLOCKS = names(ROOT, 12)
PADDED = -(-SLOT // PAGE) * PAGE


@dataclass
class Home:
    """`places` and `config` of a home that can be restored to what it was when it was made."""

    places: Places
    config: Config
    pristine: Path

    def restore(self) -> None:
        for name in ("home", "shm", "run"):
            shutil.rmtree(self.pristine.parent / name, ignore_errors=True)
            shutil.copytree(self.pristine / name, self.pristine.parent / name, copy_function=_copy)

    @property
    def arena(self) -> Path:
        return self.places.arena(self.config.store.arena_dir)

    @property
    def segment(self) -> Path:
        (path,) = (self.places.store / "segments").iterdir()
        return path

    @property
    def journal_file(self) -> Path:
        return sorted(self.places.journal.glob("*.log"))[0]

    def examine(self, *, quick: bool = False) -> Report:
        return examine(self.places, self.config, quick=quick)

    def repair(self) -> Report:
        return repair(self.places, self.config)

    def entry(self, identity: bytes) -> Entry:
        """What the index says of a block."""
        index = DiskIndex(self.places.store / "index", io=FileIO())
        try:
            found = index.get(identity)
        finally:
            index.close()
        assert found is not None
        return found

    def forget(self, *identities: bytes) -> None:
        """Out of the index; the bytes stay."""
        index = DiskIndex(self.places.store / "index", io=FileIO())
        index.apply(deletes=identities)
        index.close()

    def enter(self, *entries: Entry) -> None:
        """Into the index, whatever the slots hold."""
        index = DiskIndex(self.places.store / "index", io=FileIO())
        index.apply(entries)
        index.close()

    def serve(self) -> tuple[int, int]:
        """(blocks from host, from disk) of the prompt, by a store that starts on this home; every byte is checked."""

        async def load() -> tuple[int, int]:
            async with store(self.places, self.config, incarnation=9) as engine:
                await engine.until(lambda facts: facts["tiers"]["disk"]["state"] == "ready")
                return await engine.load(BLOCKS)

        return trio.run(load)


def data_of(path: Path | str) -> list[tuple[int, bytes]]:
    """A file's content without its holes: (offset, bytes)."""
    found = []
    with open(path, "rb") as file:
        size, at = os.fstat(file.fileno()).st_size, 0
        while at < size:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            found.append((start, os.pread(file.fileno(), at - start, start)))
    return [*found, (size, b"")]


def _copy(source: str, target: str) -> None:
    """With its holes, which say what is in use."""
    with open(target, "wb") as new:
        for offset, data in data_of(source):
            os.pwrite(new.fileno(), data, offset)
        new.truncate(offset)
    shutil.copystat(source, target)


def make_home(base: Path) -> Home:
    """Twelve blocks of one prompt in arena and disk tier, six requests in journal and ledger. XDG_RUNTIME_DIR must be
    `base / "run"`.
    """
    (base / "shm").mkdir()
    (base / "run").mkdir()
    places = Places(base / "home")
    settings = config(arena_dir=str(base / "shm"), host_bytes=1 << 20)
    places.make()
    load_or_create_key(places.identity_key)

    async def fill() -> None:
        async with store(places, settings) as engine:
            await engine.save(ROOT, BLOCKS)
            await engine.all_on_disk()

    trio.run(fill)
    journal, ledger = Journal(places.journal, segment_bytes=600), Ledger(places.ledger, keep_h=24.0)
    journal.recover()
    for batch in moved(history(6), time.time() - 2000.0):
        journal.append(batch)
        ledger.observe(batch)
    journal.close()
    ledger.close(time.time())
    pristine = base / "pristine"
    for name in ("home", "shm", "run"):
        shutil.copytree(base / name, pristine / name, copy_function=_copy)
    return Home(places, settings, pristine)


def moved(batches: list[list[AnyRecord]], seconds: float) -> list[list[AnyRecord]]:
    """The same records, written later."""
    import msgspec

    return [[msgspec.structs.replace(record, at=record.at + seconds) for record in batch] for batch in batches]


# --- damage


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """One bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes((byte ^ 1 << bit,)))


def find(path: Path, needle: bytes) -> int:
    """Where bytes stand in a file."""
    at = path.read_bytes().find(needle)
    assert at >= 0, f"{path} does not hold what was sought"
    return at


def slot_offset(home: Home, identity: bytes) -> int:
    """Where a block's bytes begin in the only segment; its footer comes PADDED later."""
    _, payload_bytes = parse_name(home.segment.name) or (0, 0)
    assert payload_bytes == PADDED
    return PAGE + (home.entry(identity).slot & 0xFFFF) * (PADDED + PAGE)


def stray_arena(home: Home, of: Path | None) -> Path:
    """An arena of a home `of` (None: it does not say) that no store has open."""
    path = Places(of or Path("/nowhere")).arena(home.config.store.arena_dir)
    arena = open_arena(path, 1 << 20)
    if of is not None:
        label = pack_home(os.fsencode(of))
        arena.buffer[HOME_AT : HOME_AT + len(label)] = label
    arena.close()
    del arena
    gc.collect()  # its views refer to each other; with them the mapping goes, and the file is nobody's
    return path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def sql(path: Path, statement: str) -> None:
    db = sqlite3.connect(path)
    with db:
        db.execute(statement)
    db.close()


def unfinished_frame() -> bytes:
    """The beginning of a write that a kill cut off."""
    return struct.pack("<II", 4000, 7) + b"x" * 100


Plant = Callable[[Home], None]
