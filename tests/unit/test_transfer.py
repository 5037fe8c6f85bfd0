"""Copies between pool and arena, with a real file as the arena."""

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

from services.worker.page_store import PageStore
from services.worker.transfer import PIECE, Transfers, copy_checked
from shared.config import FaultsConfig
from shared.faults import Faults
from shared.messages.base import unpack_u64
from shared.messages.engine import Copy, Transfer, Transferred
from tests.service.played_plans import FRONT, key_of, make_arena

BLOCK = 4096
SLOTS = 8


class Bench:
    """A pool of random blocks, an arena file, and the transfers between them."""

    def __init__(self, tmp_path: Path, hooks: dict[str, str] | None = None) -> None:
        self.arena = tmp_path / "arena"
        make_arena(self.arena, BLOCK * SLOTS)
        self.key = key_of(self.arena)
        self.pool = PageStore(4, BLOCK)
        self.pool.blocks[:] = np.random.default_rng(1).integers(0, 256, self.pool.blocks.shape, np.uint8)
        self.transfers = Transfers(self.pool, Faults(FaultsConfig(hooks=hooks or {})))
        self.seq = 0

    def run(self, save: bool, *copies: Copy, wanted: int = 1 << 30) -> Transferred | None:
        self.seq += 1
        left = [wanted]

        def still() -> bool:
            left[0] -= 1
            return left[0] >= 0

        copies = tuple(msgspec.structs.replace(copy, offset=FRONT + copy.offset) for copy in copies)
        batch = Transfer(epoch=3, seq=self.seq, save=save, arena=str(self.arena), arena_key=self.key, copies=copies)
        return self.transfers.execute(batch, still)

    def slot(self, i: int) -> bytes:
        return self.arena.read_bytes()[FRONT + i * BLOCK : FRONT + (i + 1) * BLOCK]


def ok(done: Transferred | None) -> list[int]:
    assert done is not None
    return list(done.ok)


def test_saved_bytes_come_back_under_their_checksum(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    original = bench.pool.blocks.copy()
    saved = bench.run(True, Copy(2, 5 * BLOCK), Copy(0, 1 * BLOCK))
    assert ok(saved) == [1, 1]
    assert (saved.epoch, saved.seq) == (3, 1)
    sums = unpack_u64(saved.checksums)
    assert sums[0] == xxhash.xxh3_64_intdigest(bench.slot(5)) == xxhash.xxh3_64_intdigest(original[2].data)
    assert bench.slot(1) == original[0].tobytes()
    assert bench.slot(0) == bench.slot(2) == bytes(BLOCK)
    loaded = bench.run(False, Copy(3, 5 * BLOCK, sums[0]), Copy(1, 1 * BLOCK, sums[1]))
    assert ok(loaded) == [1, 1]
    assert unpack_u64(loaded.checksums) == sums
    assert (bench.pool.block(3) == original[2]).all()
    assert (bench.pool.block(1) == original[0]).all()
    facts = bench.transfers.statistics()
    assert (facts.saved, facts.loaded, facts.failed) == (2, 2, 0)
    assert (facts.bytes_saved, facts.bytes_loaded) == (2 * BLOCK, 2 * BLOCK)


@pytest.mark.parametrize("flipped", [0, 7, BLOCK * 8 - 1])
def test_one_flipped_bit_in_the_arena_is_a_miss_of_that_block_alone(tmp_path: Path, flipped: int) -> None:
    bench = Bench(tmp_path)
    saved = bench.run(True, Copy(0, 0), Copy(1, BLOCK))
    assert saved is not None
    sums = unpack_u64(saved.checksums)
    with bench.arena.open("r+b") as file:
        file.seek(FRONT + flipped // 8)
        byte = file.read(1)[0]
        file.seek(FRONT + flipped // 8)
        file.write(bytes([byte ^ (1 << (flipped % 8))]))
    loaded = bench.run(False, Copy(2, 0, sums[0]), Copy(3, BLOCK, sums[1]))
    assert ok(loaded) == [0, 1]
    assert bench.transfers.statistics().mismatched == 1


def test_a_copy_out_of_bounds_fails_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    before = bench.pool.blocks.copy()
    done = bench.run(True, Copy(4, 0), Copy(0, BLOCK * SLOTS - BLOCK + 1), Copy(1, 2 * BLOCK), Copy(0, 1 << 62))
    assert ok(done) == [0, 0, 1, 0]
    assert done is not None
    assert unpack_u64(done.checksums)[0] == 0
    assert ok(bench.run(False, Copy(9, 0, 0), Copy(0, BLOCK * SLOTS, 0))) == [0, 0]
    assert (bench.pool.blocks == before).all()


def test_without_a_usable_arena_every_copy_fails_and_the_next_batch_works(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    hidden = bench.arena.rename(tmp_path / "hidden")
    assert ok(bench.run(True, Copy(0, 0), Copy(1, BLOCK))) == [0, 0]
    hidden.rename(bench.arena)
    assert ok(bench.run(True, Copy(0, 0), Copy(1, BLOCK))) == [1, 1]
    os.truncate(bench.arena, 0)
    assert ok(bench.run(False, Copy(0, 0, 1))) == [0]


def test_a_new_arena_file_is_mapped_when_the_key_changes(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(True, Copy(0, 0))
    bench.arena.unlink()
    make_arena(bench.arena, BLOCK * SLOTS)
    assert ok(bench.run(True, Copy(1, 0))) == [1]  # still the file of that key
    assert bench.slot(0) == bytes(BLOCK)
    bench.key = key_of(bench.arena)
    assert ok(bench.run(True, Copy(1, 0))) == [1]
    assert bench.slot(0) == bench.pool.block(1).tobytes()


def test_copies_stop_between_blocks_once_they_are_unwanted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.run(True, Copy(0, 0), Copy(1, BLOCK), Copy(2, 2 * BLOCK), wanted=2) is None
    assert bench.slot(1) == bench.pool.block(1).tobytes()
    assert bench.slot(2) == bytes(BLOCK)


@pytest.mark.parametrize("save", [True, False])
def test_an_injected_fault_fails_one_copy(tmp_path: Path, save: bool) -> None:
    bench = Bench(tmp_path, {"worker_in_save" if save else "worker_in_load": "fail:2"})
    sums = [xxhash.xxh3_64_intdigest(bytes(BLOCK))] * 3
    done = bench.run(save, *(Copy(i, i * BLOCK, sums[i]) for i in range(3)))
    assert ok(done) == [1, 0, 1]
    assert bench.transfers.statistics().failed == 1


@pytest.mark.parametrize("length", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 777])
def test_a_block_is_copied_and_checksummed_whole_whatever_its_pieces(length: int) -> None:
    source = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    into = np.zeros(length + 1, np.uint8)
    assert copy_checked(into[:length], source) == xxhash.xxh3_64_intdigest(source.data)
    assert (into[:length] == source).all()
    assert into[length] == 0


def test_a_save_gives_way_before_each_block_and_a_load_never(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    asked: list[bytes] = []
    for save in (True, False):
        copies = tuple(Copy(i, FRONT + i * BLOCK, 0) for i in range(3))
        batch = Transfer(epoch=3, seq=1, save=save, arena=str(bench.arena), arena_key=bench.key, copies=copies)
        bench.transfers.execute(batch, lambda: True, lambda: asked.append(bench.slot(len(asked))))
    assert asked == [bytes(BLOCK)] * 3  # each time before the block it was asked for was written
