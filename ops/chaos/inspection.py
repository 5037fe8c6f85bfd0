"""What a stack has: processes, open files, memory, files in its run dir and home, arenas; and what must balance.

The first look is the measure; later ones may differ by the slack. A leak that grows with kills passes any slack.
"""

import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from ops.admin import SERVICES, serving, snapshots
from ops.stack import Stack
from services.scheduler.ledger_rows import read_ledger
from shared.lock_files import holder
from shared.node import Node
from shared.paths import Places

SLACK_FILES = 4
"""Connections that are being closed."""
SLACK_BYTES = 64 << 20
SETTLE_S = 60.0
ORDERED = frozenset({0, 75, -signal.SIGKILL, -signal.SIGTERM})
"""Exit codes of ordered ends; 75: the supervisor was gone, and the service did not drain within its grace."""
_FAULT = re.compile(
    r'Traceback \(most recent call last\)|"exception": |"why": "malformed"|'
    r'"event": "(handler_failed|step_failed|catalogue_wrong|blocks_quarantined|cannot_start)"'
)
"""A checksum that does not match is no fault here: the store that held the lease may have been killed in mid-copy. One
that a living store is told of, so that it puts the slot out of use, is.
"""
_CODE = re.compile(r'"code": (-?\d+), "planned": (?:true|false), "event": "exited"')
PARTS = (".tmp", ".part")


def lives(places: Places) -> int:
    """How often services of this home have been started, by their incarnations."""
    counters = [places.incarnations / service for service in SERVICES]
    return sum(int(path.read_text()) for path in counters if path.exists())


def processes(home: Path) -> list[int]:
    """Pids of all live processes that were started on this home (by their environment)."""
    mark = b"PERDURE_HOME=" + os.fsencode(home) + b"\0"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has ended, or is not ours
                continue
    return found


@dataclass
class Look:
    """One look at a stack that is idle."""

    processes: int
    files: dict[str, int]
    bytes: dict[str, int]
    own_files: int
    run_names: frozenset[str]
    parts: list[str]
    arenas: list[str]


def _is_part(path: Path) -> bool:
    """A file that was never finished. What was moved aside for people to look at is as it was found."""
    return path.suffix in PARTS and path.parent.suffix != ".damaged"


@dataclass
class Inspection:
    """Compares looks with the first one."""

    stack: Stack
    first: Look | None = None
    largest: dict[str, int] = field(default_factory=dict)
    """Resident bytes of each service, the most that was seen."""

    def look(self) -> Look:
        """Now. The services must be up."""
        files, sizes = {}, {}
        for service in SERVICES:
            proc = Path("/proc") / str(holder(self.stack.places.run / f"{service}.lock"))
            files[service] = len(list((proc / "fd").iterdir()))
            sizes[service] = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            self.largest[service] = max(sizes[service], self.largest.get(service, 0))
        places = self.stack.places
        return Look(
            processes=len(processes(places.home)),
            files=files,
            bytes=sizes,
            own_files=len(list(Path("/proc/self/fd").iterdir())),
            run_names=frozenset(path.name for path in places.run.iterdir()),
            parts=[str(path) for home in (places.home, places.run) for path in home.rglob("*") if _is_part(path)],
            arenas=[path.name for path in Path(self.stack.arena_dir).glob(f"perdure-{places.home_hash}*")],
        )

    def grown(self, now: Look) -> list[str]:
        """What there is more of than at the first look, one line each."""
        if self.first is None:
            self.first = now
        first, found = self.first, []
        if now.processes != first.processes:
            found.append(f"{now.processes} processes, {first.processes} at first")
        for service in SERVICES:
            if now.files[service] > first.files[service] + SLACK_FILES:
                found.append(f"{service}: {now.files[service]} open files, {first.files[service]} at first")
            if now.bytes[service] > first.bytes[service] + SLACK_BYTES:
                mib = (now.bytes[service] >> 20, first.bytes[service] >> 20)
                found.append(f"{service}: {mib[0]} MiB resident, {mib[1]} MiB at first")
        if now.own_files > first.own_files + SLACK_FILES:
            found.append(f"the client's process: {now.own_files} open files, {first.own_files} at first")
        if more := now.run_names - first.run_names:
            found.append(f"files in the run dir: {sorted(more)}")
        if now.parts:
            found.append(f"unfinished files: {now.parts}")
        if len(now.arenas) != 1:
            found.append(f"{len(now.arenas)} arenas: {now.arenas}")
        return found

    async def wait_small(self) -> list[str]:
        """Looks until nothing has grown: processes notice one by one that connections were closed. What remains."""
        found: list[str] = []
        with trio.move_on_after(SETTLE_S / 2):
            while True:
                try:
                    if not (found := self.grown(self.look())):
                        return []
                except OSError as error:  # a service has just died
                    found = [str(error)]
                await trio.sleep(0.1)  # a poll of other processes
        return found


def crashes(log: Path, start: int) -> tuple[list[str], int]:
    """What nobody ordered: services that ended with a code of their own, tracebacks, damaged blocks. Restarts and
    recomputing hide them from every client. From byte `start` of the log on; also returns where the next look begins.
    """
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().rpartition(b"\n")[0]
    lines = text.decode(errors="replace").splitlines()
    found = [line for line in lines if (code := _CODE.search(line)) is not None and int(code[1]) not in ORDERED]
    found += [line for line in lines if _FAULT.search(line) is not None]
    return found, start + len(text)


async def wait_balanced(node: Node) -> str:
    """Waits until the stack is idle and all its books balance; "" or what did not, after SETTLE_S."""
    trouble = "no service answered"
    with trio.move_on_after(SETTLE_S):
        while True:
            found = await snapshots(node)
            facts = {role: one.data for role, one in found.items() if one is not None}
            trouble = _imbalance(facts) if serving(found) else f"not serving: {sorted(facts)} answer"
            if not trouble:
                return ""
            await trio.sleep(0.05)  # a poll of status
    return trouble


async def wait_saved(node: Node) -> str:
    """Waits until the disk tier works and has taken what was queued for it; "" or what keeps it, after SETTLE_S.

    (A dirty block that is not queued has been on disk: it went from there first, since the host holds it.)
    """
    trouble = "the store does not answer"
    with trio.move_on_after(SETTLE_S):
        while True:
            store = (await snapshots(node)).get("store")
            if store is not None and "tiers" in store.data:
                disk = store.data["tiers"]["disk"]
                if disk["state"] == "ready" and not disk.get("queued"):
                    return ""
                trouble = f"{disk.get('queued')} blocks wait for the disk, which is {disk['state']}: {disk['reason']}"
            await trio.sleep(0.05)  # a poll of status
    return trouble


def _imbalance(facts: dict[str, dict[str, Any]]) -> str:
    """What is out, or missing, in an idle stack."""
    scheduler, store = facts["scheduler"], facts["store"]
    pool, requests = scheduler["pool"], scheduler["requests"]
    busy = {name: requests[name] for name in ("waiting", "running", "loading", "leaving", "in_flight", "saving")}
    if any(busy.values()) or pool["locked"]:
        return f"requests {busy}, {pool['locked']} blocks locked"
    if pool["free"] + pool["cached"] + pool["locked"] != pool["total"]:
        return f"pool: {pool}"
    if "tiers" in store:
        host = store["tiers"]["host"]
        out = {"granted": host["granted"], "staging": host["staging"], "leases": store["leases"]}
        if any(out.values()):
            return f"store: {out} are out"
        if host["used"] > host["capacity"]:
            return f"host tier: {host['used']} of {host['capacity']} blocks used"
    return ""


async def ledger_gaps(path: Path, accepted: list[str]) -> str:
    """Waits until the ledger has each accepted request exactly once; "" or what it lacks or has too much."""
    wanted, trouble = sorted(accepted), ""
    with trio.move_on_after(SETTLE_S / 2):
        while True:
            rows = sorted(row["id"] for row in read_ledger(path, limit=len(wanted) + 1000))
            if rows == wanted:
                return ""
            missing, more = set(wanted) - set(rows), set(rows) - set(wanted)
            doubled = len(rows) - len(set(rows))
            trouble = f"{len(missing)} missing {sorted(missing)[:3]}, {len(more)} unknown {sorted(more)[:3]}"
            trouble += f", {doubled} twice, of {len(wanted)}"
            await trio.sleep(0.1)  # a poll of another process's file
    return trouble
