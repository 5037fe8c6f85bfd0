"""The digest names the weights' content, and is computed once for a file that stays the same."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from shared.model import digest as module
from shared.model.digest import CACHE_NAME, MAX_ENTRIES, cached_digest, digest_tensors
from shared.model.spec import open_model
from tests.tiny_models import Tiny, train_vocabulary, write_gguf

VOCABULARY = train_vocabulary(260)
TINY = Tiny(layers=1)
OLD = 1_700_000_000_000_000_000


def written(path: Path, seed: int = 0, **extra: object) -> Path:
    file = write_gguf(path, TINY, TINY.tensors(seed), vocabulary=VOCABULARY, extra=extra)
    os.utime(file, ns=(OLD, OLD))
    return file


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    runs: list[int] = []

    def counting(entries: object) -> bytes:
        runs.append(1)
        return digest_tensors(entries)  # type: ignore[arg-type]

    monkeypatch.setattr("shared.model.gguf_source.digest_tensors", counting)
    return runs


def test_equal_weights_have_one_digest_whatever_the_file_is_called(tmp_path: Path) -> None:
    a = open_model(str(written(tmp_path / "a.gguf")), tmp_path).digest()
    b = open_model(str(written(tmp_path / "b.gguf", **{"tokenizer.chat_template": "x"})), tmp_path).digest()
    c = open_model(str(written(tmp_path / "c.gguf", seed=1)), tmp_path).digest()
    assert len(a) == 32
    assert a == b != c


def test_a_single_bit_a_name_a_type_or_a_shape_changes_it() -> None:
    blob = np.arange(64, dtype=np.uint8)
    base = ("w", "F32", (4, 4), blob)
    flipped = blob.copy()
    flipped[63] ^= 1
    all_ = [base, ("v", *base[1:]), ("w", "F16", *base[2:]), ("w", "F32", (2, 8), blob), (*base[:3], flipped)]
    assert len({digest_tensors([entry]) for entry in all_}) == 5
    other = ("x", "F32", (4, 4), flipped)
    assert digest_tensors([base, other]) == digest_tensors([other, base])
    assert digest_tensors([base, other]) != digest_tensors([(*base[:3], flipped), ("x", "F32", (4, 4), blob)])


def test_large_tensors_are_hashed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ("w", "F32", (16,), np.arange(64, dtype=np.uint8))
    whole = digest_tensors([entry])
    monkeypatch.setattr(module, "_PIECE", 7)
    assert digest_tensors([entry]) == whole


def test_it_is_computed_once_for_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = counted(monkeypatch)
    file = written(tmp_path / "m.gguf")
    first = open_model(str(file), tmp_path).digest()
    assert open_model(str(file), tmp_path).digest() == first
    assert len(runs) == 1
    assert (tmp_path / CACHE_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("change", ["mtime", "content", "inode"])
def test_it_is_computed_again_when_the_file_may_be_another(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = counted(monkeypatch)
    file = written(tmp_path / "m.gguf")
    before = open_model(str(file), tmp_path).digest()
    if change == "mtime":
        os.utime(file, ns=(OLD, OLD + 1))
    elif change == "content":
        written(file, seed=1)
        os.utime(file, ns=(OLD, OLD + 1))
    else:
        os.replace(written(tmp_path / "other.gguf", seed=1), file)
    after = open_model(str(file), tmp_path).digest()
    assert len(runs) == 2
    assert (after == before) is (change == "mtime")


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = counted(monkeypatch)
    file = written(tmp_path / "m.gguf")
    os.utime(file)
    for _ in range(2):
        open_model(str(file), tmp_path).digest()
    assert len(runs) == 2
    assert not (tmp_path / CACHE_NAME).exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": 1}', '{"a": "zz"}', '{"a": "00"}', "[" * 100_000])
def test_a_broken_cache_only_costs_time(content: str, tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf")
    expected = open_model(str(file), tmp_path).digest()
    (tmp_path / CACHE_NAME).write_text(content)
    assert open_model(str(file), tmp_path).digest() == expected
    assert list(json.loads((tmp_path / CACHE_NAME).read_text()).values()) == [expected.hex()]


def test_a_place_that_cant_be_written_only_costs_time(tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf")
    source = open_model(str(file), tmp_path / "nosuch")
    assert source.digest() == source.digest()
    assert not (tmp_path / "nosuch").exists()


def test_the_cache_stays_small_and_leaves_no_part_files(tmp_path: Path) -> None:
    file = tmp_path / "f"
    for n in range(MAX_ENTRIES + 5):
        file.write_bytes(b"x")
        os.utime(file, ns=(OLD, OLD + n))
        cached_digest(tmp_path, [file], lambda n=n: n.to_bytes(32, "big"))  # type: ignore[misc]
    known = json.loads((tmp_path / CACHE_NAME).read_text())
    assert len(known) == MAX_ENTRIES
    assert (MAX_ENTRIES + 4).to_bytes(32, "big").hex() in known.values()
    assert {path.name for path in tmp_path.iterdir()} == {"f", CACHE_NAME}
