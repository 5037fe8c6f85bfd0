"""Conservation in the arena: every header FREE, GRANTED or VALID by its own CRC, every VALID payload as it says.

A kill may leave one torn header (the store writes one at a time) and grants of dead engines; a restarted store frees
both. More than that is damage.
"""

from collections import Counter

import numpy as np

from ops.doctor import mend_arena as mend
from ops.doctor.arena_view import ArenaView, read_arena
from ops.doctor.patient import Patient
from ops.doctor.report import Finding, fault, note, ok, warning
from services.store.arena.records import GRANTED, VALID, VERSION

DISCARD = "the next start makes a new one; the disk tier keeps its blocks"


def check_arena(patient: Patient) -> list[Finding]:
    """Everything about the host tier's file."""
    view = patient.arena
    if not view.there:
        return [ok("arena", f"there is no arena at {view.path} (none was made yet, or the machine was restarted)")]
    if view.refused:
        text = f"arena {view.path} can't be used: {view.refused}"
        return [fault("arena-refused", text, "remove it, or set store.arena_dir elsewhere")]
    found = _file(view)
    if view.geometry is not None and not view.trouble:
        found += _headers(patient, view)
    if not found:
        valid = int(np.count_nonzero(view.records["state"] == VALID))
        free = view.slots - len(view.records)
        granted = len(view.records) - valid
        sums = "headers hold" if patient.quick else "headers and checksums hold"
        text = f"{free:,} free + {granted:,} granted + {valid:,} valid == {view.slots:,} slots; all {sums}"
        found = [ok("arena", text)]
    return found


def _file(view: ArenaView) -> list[Finding]:
    remove = mend.remove(view.path)
    if view.unfinished:
        return [note("arena-unfinished", f"arena {view.path} was never finished; {DISCARD}", DISCARD, remove)]
    if view.trouble and "version" in view.trouble:
        text = f"arena {view.path}: {view.trouble} (we write {VERSION}); {DISCARD}"
        return [warning("arena-format", text, "start the version that wrote it, or let it go", remove)]
    if view.trouble and view.geometry is not None:
        return [fault("arena-size", f"arena {view.path} was cut: {view.trouble}", DISCARD, remove)]
    if view.trouble:
        return [fault("arena-damaged", f"arena {view.path}: {view.trouble}", DISCARD, remove)]
    if view.allocated < view.size:
        text = f"arena {view.path} has {view.size - view.allocated:,} bytes of holes: memory may run out under it"
        return [warning("arena-holes", text, "the next start fills them, or makes a new arena")]
    return []


def _headers(patient: Patient, view: ArenaView) -> list[Finding]:
    torn, bad, extents, view = _settled(patient, view)
    found = []
    if extents:
        text = f"extents whose record in the arena's table fails its CRC: {len(extents)} (the first is {extents[0]})"
        found.append(fault("arena-extent", text, "their blocks are misses", mend.free_extents(view.path, extents)))
    if torn:
        text = f"headers of the arena that fail their CRC: {len(torn)} (the first of slot {torn[0]})"
        way = "their blocks are misses; one may be torn by a kill, and the next start frees it"
        make = fault if len(torn) > 1 or patient.store_lives else warning
        found.append(make("arena-header", text, way, mend.free_slots(view.path, torn)))
    if bad:
        text = f"blocks in the arena that fail their checksums: {len(bad)} (the first in slot {bad[0]})"
        found.append(
            fault(
                "arena-payload",
                text,
                "they are dropped; until then each load finds it out and is a miss",
                mend.free_slots(view.path, bad),
            )
        )
    states = view.records["state"]
    valid = view.records[states == VALID]
    identities = [record.tobytes() for record in valid["identity"]]
    twice = [name for name, count in Counter(identities).items() if count > 1]
    if twice:
        text = f"blocks that lie in the arena twice: {len(twice)} (the first is {twice[0].hex()[:12]})"
        found.append(warning("arena-double", text, "the next start keeps the newer one"))
    granted = view.records[states == GRANTED]
    if len(granted) and not patient.store_lives:
        text = f"slots that are granted although no store runs: {len(granted)}"
        found.append(note("arena-granted", text, "the next start frees each as soon as its engine has spoken"))
    if not patient.store_lives:
        known = set(identities) | patient.disk_identities
        chains = [(record["parent"].tobytes(), record["root"].tobytes()) for record in valid]
        orphans = sum(1 for parent, root in chains if parent not in known and parent != root)
        if orphans:
            text = f"blocks in the arena whose parent no tier holds: {orphans}; they can't be found and age out"
            found.append(note("chain-broken", text))
    return found


def _settled(patient: Patient, view: ArenaView) -> tuple[list[int], list[int], list[int], ArenaView]:
    """Torn headers, bad payloads, bad extents; under a store that lives, those that are so twice."""
    if not patient.store_lives or not (view.torn or view.bad or view.extents):
        return view.torn, view.bad, view.extents, view
    again = read_arena(view.path, payloads=bool(view.bad))
    generations = {int(record["slot"]): int(record["generation"]) for record in view.records}
    same = {int(r["slot"]) for r in again.records if generations.get(int(r["slot"])) == int(r["generation"])}
    bad = sorted(set(view.bad) & set(again.bad) & same)
    return sorted(set(view.torn) & set(again.torn)), bad, sorted(set(view.extents) & set(again.extents)), again
