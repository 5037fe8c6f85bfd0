"""The file of packed weights: what was written is what is mapped, and whatever happens to it is noticed."""

import errno
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu import converted
from kernels.cpu.converted import Damaged

PARTS = {"embed": 5000, "layers.0.q+layers.0.k": 4096, "empty": 0, "norm": 1}


def part(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).integers(0, 256, PARTS[name], np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = converted.path_of(tmp_path / "packed", b"d" * 32, "panels-1")
    converted.write(path, PARTS.items(), part)
    return path


def test_what_was_packed_is_what_is_mapped(file: Path) -> None:
    found = converted.opened(file, PARTS)
    assert set(found) == set(PARTS)
    for name in PARTS:
        assert np.array_equal(found[name], part(name))
        assert found[name].ctypes.data % 64 == 0
        assert not found[name].flags.writeable
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_other_weights_or_another_packing_have_another_name(tmp_path: Path) -> None:
    names = {converted.path_of(tmp_path, digest, how) for digest in (b"a", b"b") for how in ("x", "y")}
    assert len(names) == 4


def test_a_model_with_other_parts_is_not_served_from_it(file: Path) -> None:
    with pytest.raises(Damaged, match="other parts"):
        converted.opened(file, PARTS | {"norm": 2})


@given(data=st.data())
def test_any_flipped_bit_in_use_and_any_cut_is_noticed(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("packed") / "x.packed"
    converted.write(path, PARTS.items(), part)
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    try:
        found = converted.opened(path, PARTS)
    except ValueError:
        return
    for name in PARTS:  # it was padding
        assert np.array_equal(found[name], part(name))


@pytest.mark.parametrize("name", [name for name, size in PARTS.items() if size])
def test_a_bit_of_each_part_and_of_the_table_is_checked(file: Path, name: str) -> None:
    found = converted.opened(file, PARTS)[name]
    whole = bytearray(file.read_bytes())
    at = whole.index(found.tobytes())
    whole[at] ^= 1
    file.write_bytes(whole)
    with pytest.raises(Damaged, match="is not what was written"):
        converted.opened(file, PARTS)
    file.write_bytes(whole[:20] + b"!" + whole[21:])
    with pytest.raises(Damaged, match="table of parts"):
        converted.opened(file, PARTS)


def test_what_a_killed_packer_left_goes_and_a_living_ones_stays(file: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, living, other = (
        file.with_name(f"{name}.{pid}.part")
        for name, pid in ((file.name, ended.pid), (file.name, os.getppid()), ("other.packed", ended.pid))
    )
    for left in (dead, living, other):
        left.write_bytes(b"half")
    converted.write(file, PARTS.items(), part)
    assert (dead.exists(), living.exists(), other.exists()) == (False, True, True)


def test_a_packing_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def full(name: str) -> np.ndarray:
        if name == "norm":
            raise OSError(errno.ENOSPC, "No space left on device")
        return part(name)

    with pytest.raises(OSError, match="No space"):
        converted.write(tmp_path / "x.packed", PARTS.items(), full)
    with pytest.raises(ValueError, match="norm packs into 2 bytes, not 1"):
        converted.write(
            tmp_path / "x.packed", PARTS.items(), lambda name: part(name) if name != "norm" else np.zeros(2, np.uint8)
        )
    assert list(tmp_path.iterdir()) == []
