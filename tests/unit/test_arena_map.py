"""The arena as the worker sees it: only the very file that is meant, ours and regular, never beyond its end."""

import os
from pathlib import Path

import numpy as np
import pytest

from services.worker.arena_map import ArenaMap, Arenas, ArenaUnusable
from tests.service.played_plans import key_of

SIZE = 64 * 1024


def make(path: Path, byte: int = 1, size: int = SIZE) -> str:
    path.write_bytes(bytes([byte]) * size)
    path.chmod(0o600)
    return str(path)


def test_a_payload_is_the_file_itself_in_both_directions(tmp_path: Path) -> None:
    path = make(tmp_path / "arena")
    arena = ArenaMap(path, key_of(Path(path)))
    payload = arena.payload(4096, 100)
    assert (payload == 1).all()
    payload[:] = 5
    assert Path(path).read_bytes()[4095:4197] == b"\x01" + b"\x05" * 100 + b"\x01"


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 8), (SIZE - 7, 8), (SIZE, 1), (1 << 63, 8)])
def test_an_offset_outside_the_file_is_refused(tmp_path: Path, offset: int, nbytes: int) -> None:
    path = make(tmp_path / "arena")
    arena = ArenaMap(path, key_of(Path(path)))
    assert len(arena.payload(SIZE - 8, 8)) == 8
    with pytest.raises(ArenaUnusable, match=f"outside the arena of {SIZE}"):
        arena.payload(offset, nbytes)


def test_what_is_no_regular_file_of_ours_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "arena")
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ArenaUnusable):
        ArenaMap(str(link), "k")
    with pytest.raises(ArenaUnusable):
        ArenaMap(str(tmp_path / "absent"), "k")
    with pytest.raises(ArenaUnusable):
        ArenaMap(str(tmp_path), "k")
    with pytest.raises(ArenaUnusable):
        ArenaMap("nul\0byte", "k")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ArenaUnusable, match="no regular file"):
        ArenaMap(str(tmp_path / "fifo"), "k")
    with pytest.raises(ArenaUnusable, match="is empty"):
        ArenaMap(make(tmp_path / "empty", size=0), "k")
    Path(path).chmod(0o666)
    with pytest.raises(ArenaUnusable, match="writable by others"):
        ArenaMap(path, "k")


def test_a_file_of_another_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "arena")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ArenaUnusable, match="belongs to uid"):
        ArenaMap(path, "k")


def test_another_file_under_the_same_name_is_mapped_under_its_own_key_alone(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    make(path, 1)
    arenas = Arenas()
    first = key_of(path)
    mapped = arenas.open(str(path), first)
    old = mapped.payload(0, SIZE)
    assert arenas.open(str(path), first) is mapped
    path.unlink()
    make(path, 2, 2 * SIZE)
    assert arenas.open(str(path), first) is mapped  # still the file that the key names
    second = key_of(path)
    assert arenas.open(str(path), second).payload(SIZE, 1)[0] == 2
    assert arenas.open(str(path), second).nbytes == 2 * SIZE
    assert (np.asarray(old) == 1).all()  # its mapping lives as long as the view
    with pytest.raises(ArenaUnusable, match="is another file"):
        arenas.open(str(path), first)


def test_an_inode_that_came_back_is_told_by_the_nonce_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    make(path, 1)
    key = key_of(path)
    assert ArenaMap(str(path), key).nbytes == SIZE
    make(path, 2)  # the same inode, begun anew
    with pytest.raises(ArenaUnusable, match="is another file"):
        ArenaMap(str(path), key)


def test_a_key_whose_file_is_gone_is_not_served_by_the_old_mapping(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    make(path)
    arenas = Arenas()
    first = key_of(path)
    arenas.open(str(path), first)
    path.unlink()
    for key in ("second", first):  # nor is the old mapping kept
        with pytest.raises(ArenaUnusable):
            arenas.open(str(path), key)


def test_a_shrunken_file_is_refused_instead_of_sigbus_and_used_again_once_mended(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    make(path)
    key = key_of(path)
    arenas = Arenas()
    mapped = arenas.open(str(path), key)
    os.truncate(path, 4096)
    with pytest.raises(ArenaUnusable, match=f"shrank from {SIZE} to 4096"):
        mapped.payload(8192, 8)  # in the middle of a batch
    with pytest.raises(ArenaUnusable, match=f"shrank from {SIZE} to 4096"):
        arenas.open(str(path), key)
    assert arenas.open(str(path), key).nbytes == 4096
    with pytest.raises(ArenaUnusable, match="outside"):
        arenas.open(str(path), key).payload(8192, 8)


def mapped_kib(path: str) -> int:
    """Resident KiB of this process's mapping of a file."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.endswith(path))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1])


def test_page_tables_are_filled_piece_by_piece(tmp_path: Path) -> None:
    path = make(tmp_path / "arena", size=5 * SIZE)
    arenas = Arenas()
    assert arenas.populate(SIZE)  # there is none yet
    arenas.open(path, key_of(Path(path)))
    assert mapped_kib(path) == 0
    assert [arenas.populate(2 * SIZE) for _ in range(3)] == [False, False, True]
    assert mapped_kib(path) == 5 * SIZE // 1024
    assert arenas.populate(SIZE)


def test_a_file_that_was_cut_is_not_filled_any_further(tmp_path: Path) -> None:
    path = make(tmp_path / "arena", size=2 * SIZE)
    arenas = Arenas()
    arenas.open(path, key_of(Path(path)))
    assert not arenas.populate(SIZE)
    os.truncate(path, SIZE)
    assert arenas.populate(SIZE)
