"""The doctor's look at the machine around a home, and at what running services say."""

import os
import resource
from pathlib import Path

import pytest

from ops.doctor import machine
from ops.doctor.index import read_index
from ops.doctor.machine import check_machine, logind_files, removes_ipc
from ops.doctor.patient import Patient
from ops.doctor.report import Finding, Level, Report, fault, note, ok
from ops.doctor.running import Told, check_running
from ops.doctor.segments import read_segments
from shared.config import Config, FaultsConfig, StoreConfig
from shared.messages.admin import Integrity
from shared.messages.hello import Snapshot
from shared.paths import Places
from tests.disk_kit import chain, open_tier


def patient(tmp_path: Path, *, faults: FaultsConfig | None = None, **store: object) -> Patient:
    settings = StoreConfig(**({"arena_dir": str(tmp_path), "host_bytes": 1 << 20} | store))  # type: ignore[arg-type]
    return Patient(Places(tmp_path / "home"), Config(store=settings, faults=faults or FaultsConfig()))


def names(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_shared_memory_smaller_than_the_host_tier_needs(tmp_path: Path) -> None:
    assert names(check_machine(patient(tmp_path))) == ["machine"]
    (small,) = check_machine(patient(tmp_path, host_bytes=1 << 60))
    assert small.name == "shm-small"
    assert f"{1 << 60:,}" in small.what
    assert "--shm-size" in small.way_out


def test_locked_memory_that_the_limit_does_not_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 19, 1 << 20))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (low,) = check_machine(patient(tmp_path, lock_memory=True))
    assert low.name == "memlock-low"
    assert "1,048,576" in low.what
    assert "524,288" in low.what
    assert names(check_machine(patient(tmp_path))) == ["machine"], "nobody asks for it"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert names(check_machine(patient(tmp_path, lock_memory=True))) == ["machine"], "root has no limit"


def test_fault_hooks_that_are_set(tmp_path: Path) -> None:
    assert names(check_machine(patient(tmp_path, faults=FaultsConfig(max_host_blocks=3)))) == ["fault-hooks"]


@pytest.mark.parametrize(
    ("files", "answer"),
    [
        ({}, True),
        ({"etc": "[Login]\n#RemoveIPC=no\n"}, True),
        ({"etc": "[Login]\nRemoveIPC=no\n"}, False),
        ({"etc": "[Login]\nRemoveIPC=0\n", "etc/d/20.conf": "[Login]\nRemoveIPC=yes\n"}, True),
        ({"usr/lib/d/10.conf": "[Login]\nRemoveIPC=off\n"}, False),
        ({"usr/lib/d/10.conf": "[Login]\nRemoveIPC=no\n", "etc/d/10.conf": "[Login]\nRemoveIPC=yes\n"}, True),
        ({"etc": "not an ini file"}, True),
    ],
)
def test_what_logind_is_told_about_remove_ipc(tmp_path: Path, files: dict[str, str], answer: bool) -> None:
    for name, text in files.items():
        top, _, drop = name.partition("/d/")
        path = tmp_path / top / "systemd" / (f"logind.conf.d/{drop}" if drop else "logind.conf")
        write(path, text)
    assert removes_ipc(logind_files(tmp_path)) is answer


def test_remove_ipc_matters_to_people_whose_arena_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    monkeypatch.setattr(machine, "is_memory", lambda directory: True)
    one = patient(tmp_path)
    assert names(check_machine(one, root=root, uid=54321)) == ["machine"], "no logind runs here"
    for folder in ("users", "seats"):
        (root / "run" / "systemd" / folder).mkdir(parents=True)
    (warned,) = check_machine(one, root=root, uid=54321)
    assert (warned.name, warned.level) == ("remove-ipc", Level.WARNING)
    assert "54321" in warned.what
    assert names(check_machine(one, root=root, uid=0)) == ["machine"], "system users are spared"
    write(root / "var/lib/systemd/linger/54321", "")
    assert names(check_machine(one, root=root, uid=54321)) == ["machine"], "this user is never logged out"
    (root / "var/lib/systemd/linger/54321").unlink()
    monkeypatch.setattr(machine, "is_memory", lambda directory: False)
    assert names(check_machine(one, root=root, uid=54321)) == ["machine"], "an arena on disk is not touched"


def told(scheduler: dict[str, object] | None = None, store: dict[str, object] | None = None) -> Told:
    """Services that are idle and right, but for what is given."""
    idle = dict.fromkeys(("waiting", "running", "loading", "leaving", "in_flight", "saving"), 0)
    pool = {"free": 6, "cached": 3, "locked": 0, "total": 9}
    data: dict[str, dict[str, object]] = {
        "scheduler": {"requests": idle, "pool": pool} | (scheduler or {}),
        "store": {"leases": 0, "tiers": {"host": {"granted": 0}}} | (store or {}),
        "worker": {"note": "toy:7 on toy"},
        "tokenizer": {},
        "detokenizer": {},
    }
    snapshots: dict[str, Snapshot | None] = {
        role: Snapshot(role=role, engine="e0", incarnation=1, pid=1, uptime_s=1.0, ready=True, data=facts)
        for role, facts in data.items()
    }
    return Told(snapshots, {"scheduler": Integrity(), "store": Integrity()})


def test_services_that_are_right_are_called_right() -> None:
    assert names(check_running(told())) == ["services"]
    assert check_running(Told()) == []


@pytest.mark.parametrize(
    ("said", "name", "level"),
    [
        (told({"pool": {"free": 6, "cached": 2, "locked": 0, "total": 9}}), "pool-conservation", Level.FAULT),
        (told({"pool": {"free": 5, "cached": 3, "locked": 1, "total": 9}}), "pool-conservation", Level.FAULT),
        (told(store={"leases": 2}), "lease-left", Level.WARNING),
        (told(store={"tiers": {"host": {"granted": 4}}}), "grant-left", Level.NOTE),
        (told(store={"note": "disk tier full"}), "service-complains", Level.WARNING),
        (told({"faults": True}), "fault-hooks", Level.WARNING),
    ],
)
def test_a_sum_that_does_not_hold_is_found_by_name(said: Told, name: str, level: Level) -> None:
    (found,) = [finding for finding in check_running(said) if finding.level]
    assert (found.name, found.level) == (name, level)


def test_what_is_held_while_requests_run_is_no_fault() -> None:
    busy = {"requests": {"running": 1}, "pool": {"free": 5, "cached": 3, "locked": 1, "total": 9}}
    assert names(check_running(told(busy, {"leases": 1, "tiers": {"host": {"granted": 2}}}))) == ["services"]


def test_complaints_of_the_services_own_checks_are_faults() -> None:
    said = told()
    said.integrity = {"scheduler": Integrity(complaint="7 pins of 6"), "store": Integrity(complaint="slot 3")}
    found = [finding for finding in check_running(said) if finding.level]
    assert names(found) == ["pool-conservation", "arena-conservation"]
    assert "7 pins of 6" in found[0].what


def test_leases_of_engines_that_are_not_connected_are_named() -> None:
    said = told()
    said.integrity["store"] = Integrity(absent_leases=3)
    (found,) = [finding for finding in check_running(said) if finding.level]
    assert (found.name, found.level) == ("lease-left", Level.WARNING)


def test_a_service_that_is_away_is_named() -> None:
    said = told()
    said.snapshots["worker"] = None
    (found,) = [finding for finding in check_running(said) if finding.level]
    assert (found.name, found.what[:6]) == ("service-away", "worker")


def test_a_report_is_content_unless_something_is_at_fault() -> None:
    report = Report("/home", [ok("disk", "fine"), note("slot-orphan", "2 slots")])
    assert report.content
    report.findings.append(fault("slot-payload", "1 block", "dropped", lambda: "done"))
    assert not report.content
    plain = report.plain()
    assert (plain["content"], plain["worst"]) == (False, "fault")
    assert plain["findings"][2] == {
        "level": "fault", "name": "slot-payload", "what": "1 block", "way_out": "dropped", "mendable": True,
    }  # fmt: skip


def test_a_finding_that_nobody_could_look_up_is_refused() -> None:
    with pytest.raises(ValueError, match="look it up"):
        ok("made-up", "text")


def test_p25_what_is_read_of_the_disk_tier_grows_with_its_blocks_and_no_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    real = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        reads.append(length)
        return real(fd, length, offset)

    counts = {}
    for blocks in (50, 500):
        tier = open_tier(tmp_path / str(blocks), capacity=256 << 20)
        for number in range(blocks // 50):
            tier.save(chain(f"c{number}", 50))
        tier.close()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", counted)
            reads.clear()
            found = read_segments(tmp_path / str(blocks) / "segments", payloads=True)
        rows = read_index(tmp_path / str(blocks) / "index")
        assert len(found.footers) == len(rows.entries) == blocks
        assert not found.bad
        assert not found.torn
        counts[blocks] = len(reads), sum(reads)
    assert counts[500][0] <= 10 * counts[50][0]
    assert counts[500][1] <= 10 * counts[50][1]
