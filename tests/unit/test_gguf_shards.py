"""A GGUF model in several files: the same model as in one, found by any of them, and what must be refused."""

from pathlib import Path

import pytest

from shared.model.gguf_shards import read_gguf
from shared.model.spec import BadModel, open_model
from tests.tiny_models import Tiny, split_gguf, train_vocabulary, write_gguf

VOCABULARY = train_vocabulary()


def written(path: Path) -> Path:
    tiny = Tiny()
    return write_gguf(path, tiny, tiny.tensors(), kind="Q8_0", vocabulary=VOCABULARY)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return split_gguf(written(tmp_path / "m.gguf"), 3)


def test_shards_are_the_model_that_one_file_is(tmp_path: Path, shards: list[Path]) -> None:
    one = open_model(str(written(tmp_path / "one.gguf")), tmp_path)
    for named in shards:
        many = open_model(str(named), tmp_path)
        assert many.spec.name == "m"
        assert many.spec.source == shards[0]
        assert many.spec.fingerprint_fields() == one.spec.fingerprint_fields()
        assert many.digest() == one.digest()
        assert many.tensors().keys() == one.tensors().keys()
        for name, tensor in many.tensors().items():
            assert tensor.raw().tobytes() == one.tensors()[name].raw().tobytes()
        assert many.tokenizer().get_vocab() == one.tokenizer().get_vocab()


def test_each_file_counts_for_the_digest(tmp_path: Path, shards: list[Path]) -> None:
    before = open_model(str(shards[0]), tmp_path).digest()
    content = bytearray(shards[2].read_bytes())
    content[-1] ^= 1
    shards[2].write_bytes(content)
    assert open_model(str(shards[0]), tmp_path).digest() != before


def test_missing_files_are_named(tmp_path: Path, shards: list[Path]) -> None:
    for gone in shards[1:]:
        gone.unlink()
    missing = (
        r"2 of the model's 3 files are missing: m-00002-of-00003\.gguf, m-00003-of-00003\.gguf; they belong beside it"
    )
    with pytest.raises(BadModel, match=missing):
        open_model(str(shards[0]), tmp_path)


def test_a_file_in_the_place_of_another_is_named(tmp_path: Path, shards: list[Path]) -> None:
    shards[1].write_bytes(shards[2].read_bytes())
    says = r"m-00002-of-00003\.gguf says that it is file 2 of 3 \(counted from 0\), its name that it is 1 of 3"
    with pytest.raises(BadModel, match=says):
        open_model(str(shards[0]), tmp_path)


def test_another_count_than_the_names_is_refused(shards: list[Path]) -> None:
    renamed = shards[0].rename(shards[0].with_name("m-00001-of-00004.gguf"))
    with pytest.raises(BadModel, match=r"is one of 3 files; they are found by names that end in -00001-of-00003\.gguf"):
        read_gguf(renamed)


def test_a_shard_cut_short_is_named_with_both_sizes(tmp_path: Path, shards: list[Path]) -> None:
    size = shards[1].stat().st_size
    with shards[1].open("r+b") as file:
        file.truncate(size - 500)
    ends = rf"m-00002-of-00003\.gguf: tensor \S+ ends at byte \d+, the file has {size - 500}; it is cut short"
    with pytest.raises(BadModel, match=ends):
        open_model(str(shards[0]), tmp_path)


def test_too_few_tensors_are_counted(tmp_path: Path, shards: list[Path]) -> None:
    tiny = Tiny()
    every = tiny.tensors()
    other = tmp_path / "other"
    other.mkdir()
    few = dict(list(every.items())[:9])
    part = split_gguf(write_gguf(other / "m.gguf", tiny, few, kind="Q8_0", vocabulary=VOCABULARY), 3)
    shards[2].write_bytes(part[2].read_bytes())
    with pytest.raises(BadModel, match=rf"the model has {len(every)} tensors, its 3 files hold"):
        open_model(str(shards[0]), tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path, shards: list[Path]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tensors = Tiny().tensors()
    turned = dict([*list(tensors.items())[1:], *list(tensors.items())[:1]])
    part = split_gguf(write_gguf(other / "m.gguf", Tiny(), turned, kind="Q8_0", vocabulary=VOCABULARY), 3)
    shards[2].write_bytes(part[2].read_bytes())
    with pytest.raises(BadModel, match=r"m-00003-of-00003\.gguf: tensor '\S+' is in m-0000\d-of-00003\.gguf too"):
        open_model(str(shards[0]), tmp_path)
