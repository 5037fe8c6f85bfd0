"""Huge pages and locked memory: asked for, checked, told; nothing breaks where the kernel refuses."""

import mmap
import resource
from pathlib import Path

import pytest

from shared import large_memory
from shared.config import ConfigError
from shared.large_memory import LargeMemory, Wish, anonymous_policy, counted, tmpfs_policy

MIB = 1 << 20


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(large_memory, "SYSTEM", tmp_path)
    return tmp_path


def test_what_is_locked_is_counted_and_what_can_not_be_is_said_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = mmap.mmap(-1, MIB)
    memory[:] = b"x" * MIB
    large = LargeMemory("the pool", "kv", memory, Wish(lock=True))
    facts = large.facts()
    if facts["locked"] == "yes":
        assert facts["locked_bytes"] >= MIB
        assert large.warnings == []
    else:
        assert "RLIMIT_MEMLOCK" in facts["locked"]
        assert large.warnings
    monkeypatch.setattr(large_memory, "_mlock2", lambda *_: -1)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    refused = LargeMemory("the pool", "kv", mmap.mmap(-1, MIB), Wish(lock=True))
    assert len(refused.warnings) == 1
    assert "1,048,576 bytes, RLIMIT_MEMLOCK allows 65,536" in refused.warnings[0]


def test_unasked_nothing_is_locked_and_nobody_is_warned(system: Path) -> None:
    (system / "enabled").write_text("always madvise [never]")
    large = LargeMemory("the pool", "kv", mmap.mmap(-1, MIB), Wish())
    assert large.warnings == []
    assert large.facts()["locked"] == "off: kv.lock_memory is false"
    assert "is never; write madvise" in large.facts()["huge_pages"]


def test_huge_pages_that_were_asked_for_and_not_had_are_one_warning(system: Path) -> None:
    (system / "enabled").write_text("always madvise [never]")
    large = LargeMemory("the pool", "kv", mmap.mmap(-1, MIB), Wish(huge="on"))
    assert len(large.warnings) == 1
    assert large.warnings[0].startswith("the pool has no huge pages: ")
    (system / "enabled").write_text("always [madvise] never")
    assert anonymous_policy() == ""


@pytest.mark.parametrize(
    ("shmem", "options", "reason"),
    [
        ("always within_size [advise] never deny force", "rw,huge=advise", ""),
        ("always within_size advise [never] deny force", "rw,huge=within_size", ""),
        ("always within_size advise [never] deny force", "rw,size=1g", "mounted without huge pages"),
        ("always within_size advise never deny [force]", "rw", ""),
        ("always within_size advise never [deny] force", "rw,huge=always", "is deny"),
    ],
)
def test_the_mount_and_the_kernel_decide_over_a_tmpfs(system: Path, shmem: str, options: str, reason: str) -> None:
    (system / "shmem_enabled").write_text(shmem)
    mounts = system / "mounts"
    mounts.write_text(f"none / ext4 rw 0 0\nnone {system} tmpfs {options} 0 0\n")
    found = tmpfs_policy(system / "arena", mounts)
    assert reason in found
    assert bool(reason) == bool(found)
    mounts.write_text("none / ext4 rw 0 0\n")
    if "deny" not in reason:
        assert "no tmpfs" in tmpfs_policy(system / "arena", mounts)


def test_a_word_that_means_nothing_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"store\.huge_pages is 'yes'; write one of auto, on, off"):
        Wish("yes").checked("store")


def test_an_address_that_is_not_mapped_counts_nothing() -> None:
    assert counted(0) == {"huge_bytes": 0, "locked_bytes": 0}
