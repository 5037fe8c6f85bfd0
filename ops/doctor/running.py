"""What the services say of themselves: they answer, their sums hold, and nothing is held for anybody who is gone.

A sum that does not hold while work goes on is asked for again: the two sides of it are told one after the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from ops.admin import SERVICES, admin, reach, snapshots
from ops.doctor.report import Finding, fault, note, ok, warning
from shared.messages.admin import CheckIntegrity, Integrity
from shared.messages.hello import Snapshot
from shared.paths import Places
from shared.peers import DeadlinePassed, PeerGone, PeerSlow, ProtocolViolation, RequestFailed

CHECKED = ("scheduler", "store")
CHECK_S = 30.0
ASK_AGAIN = 5
PAUSE_S = 0.2


@dataclass
class Told:
    """What each service said: its snapshot (None: no answer), and of CHECKED the answer to CheckIntegrity."""

    snapshots: dict[str, Snapshot | None] = field(default_factory=dict)
    integrity: dict[str, Integrity] = field(default_factory=dict)

    @property
    def anybody(self) -> bool:
        """Whether any service answered."""
        return any(self.snapshots.values())


async def ask(places: Places) -> Told:
    """Asks until nothing contradicts, a few times at most."""
    told = Told()
    async with admin(places) as node:
        for _ in range(ASK_AGAIN):
            told = Told(await snapshots(node))
            for role in CHECKED:
                peer = await reach(node, role) if told.snapshots.get(role) else None
                if peer is not None:
                    try:
                        told.integrity[role] = await peer.ask(CheckIntegrity(), Integrity, deadline_s=CHECK_S)
                    except (PeerGone, PeerSlow, DeadlinePassed, RequestFailed, ProtocolViolation):
                        continue
            if not any(finding.level for finding in check_running(told)):
                break
            await trio.sleep(PAUSE_S)  # work goes on meanwhile; what is wrong for good stays so
    return told


def check_running(told: Told) -> list[Finding]:
    """Nothing to say when no service answered."""
    if not told.anybody:
        return []
    found = []
    away = [role for role in SERVICES if told.snapshots.get(role) is None]
    if away:
        text = f"{', '.join(away)} of {len(SERVICES)} services do not answer"
        found.append(warning("service-away", text, "see `perdure status` and what the stack prints"))
    for role, snapshot in told.snapshots.items():
        if snapshot is not None and snapshot.data.get("faults"):
            text = f"fault hooks are set in the {role} that runs"
            found.append(warning("fault-hooks", text, "restart the stack without them"))
        if snapshot is not None and role in CHECKED and snapshot.data.get("note"):
            found.append(
                warning("service-complains", f"{role}: {snapshot.data['note']}", "what it says is what is wrong")
            )
    for role, answer in told.integrity.items():
        found += _integrity(role, answer)
    found += _sums(told)
    if not any(finding.level for finding in found):
        found.append(ok("services", f"{len(SERVICES)} services answer, and their sums hold"))
    return found


def _integrity(role: str, answer: Integrity) -> list[Finding]:
    name = "pool-conservation" if role == "scheduler" else "arena-conservation"
    if answer.complaint:
        return [fault(name, f"{role}: {answer.complaint}", f"`perdure restart {role}`, and report it: this is a bug")]
    if answer.absent_leases:
        text = f"{answer.absent_leases} leases belong to engines that are not connected"
        return [warning("lease-left", text, "they end with the engine's process: stop it, if it is not coming back")]
    if answer.skipped:
        return [ok("services", f"{role}: {answer.skipped}")]
    return []


def _sums(told: Told) -> list[Finding]:
    found = []
    scheduler, store = (snapshot.data if snapshot else {} for snapshot in map(told.snapshots.get, CHECKED))
    pool = scheduler.get("pool") or {}
    if pool and pool["free"] + pool["cached"] + pool["locked"] != pool["total"]:
        text = (
            f"pool: {pool['free']} free + {pool['cached']} cached + {pool['locked']} locked != {pool['total']} blocks"
        )
        found.append(fault("pool-conservation", text, "`perdure restart scheduler`, and report it: this is a bug"))
    idle = scheduler and not any(scheduler.get("requests", {}).get(name) for name in BUSY)
    if idle and pool and pool["locked"]:
        text = f"{pool['locked']} blocks of the pool are locked, and no request runs"
        found.append(fault("pool-conservation", text, "`perdure restart scheduler`, and report it: this is a bug"))
    if idle and store:
        found += _held(store)
    return found


BUSY = ("waiting", "running", "loading", "leaving", "in_flight", "saving")


def _held(store: Mapping[str, Any]) -> list[Finding]:
    """Of a store whose only engine is idle."""
    found = []
    if store.get("leases"):
        text = f"{store['leases']} leases are open, and no request of the engine loads anything"
        found.append(warning("lease-left", text, "they end with the scheduler's process: `perdure restart scheduler`"))
    granted = store.get("tiers", {}).get("host", {}).get("granted", 0)
    if granted:
        text = f"{granted} slots of the arena are granted, and the engine saves nothing"
        found.append(note("grant-left", text, "they come back when the scheduler opens the store again"))
    return found
