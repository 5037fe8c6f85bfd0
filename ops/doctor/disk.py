"""Conservation on disk: index against footers, both ways; bytes counted against bytes taken; capacity and floor.

index entry ──► its slot's footer says the same         else a dangling entry: a miss, never wrong bytes
footer      ──► the index names its slot                else an orphan: swept at the next start
segment     ──► superblock, size, and no slot twice
"""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ops.doctor import mend_disk as mend
from ops.doctor.index import IndexRows, read_index
from ops.doctor.patient import Patient
from ops.doctor.report import Finding, fault, note, ok, warning
from ops.doctor.segments import Segments, read_segments, still_bad
from services.store.disk.block import footer_of
from services.store.disk.footer import FORMAT, SLOT_BITS, padded
from services.store.disk.index import FORMAT as INDEX_FORMAT
from services.store.disk.index_place import IndexPlace
from services.store.disk.index_record import Entry
from shared.fileio import FileIO

SLACK_BYTES = 1 << 20
"""What a file system may take for its own tables beside our bytes."""

PURGE = "remove the cache with `perdure cache purge`"


def check_disk(patient: Patient) -> list[Finding]:
    """Everything about the disk tier."""
    directory = patient.places.store
    if not (directory / "segments").is_dir() and not (directory / "index").is_dir():
        return [ok("disk", "there is no disk tier yet")]
    found = [*_files(patient), *_index(patient), *_both_ways(patient), *_space(patient)]
    if not any(finding.level for finding in found):
        checked = "footers" if patient.quick else "footers and checksums"
        slots = len(patient.segments.footers)
        found = [ok("disk", f"blocks: {slots:,}, segments: {len(patient.segments.files)}; index and {checked} agree")]
    return found


def _files(patient: Patient) -> list[Finding]:
    found = []
    for facts in patient.segments.files:
        if facts.trouble.startswith("format"):
            age = "newer" if facts.version > FORMAT else "older"
            text = f"{facts.path} is of segment {facts.trouble}, this version writes {FORMAT}: the disk tier stays off"
            found.append(fault("disk-format", text, f"start the {age} version that wrote it, or {PURGE}"))
        elif facts.trouble == "superblock":
            text = f"{facts.path}: its first page is damaged; footers name their own slots, so no block is lost by it"
            found.append(fault("segment-superblock", text, "it is written anew", mend.superblock(facts.path)))
        elif facts.trouble == "unfinished":
            text = f"{facts.path} was being made; it has no first page yet"
            found.append(note("segment-superblock", text, "it is written, or removed", mend.superblock(facts.path)))
        elif facts.trouble:
            text = f"{facts.path} can't be read: {facts.trouble}"
            found.append(fault("segment-missing", text, "make it readable, or remove it and lose its blocks"))
        if facts.needs > facts.size and not patient.store_lives:
            text = f"{facts.path} has {facts.size:,} bytes, its slots need {facts.needs:,}: blocks behind that are lost"
            found.append(fault("segment-truncated", text, "it is extended again", mend.superblock(facts.path)))
    for path in patient.segments.foreign:
        found.append(note("segment-foreign", f"{path} is no segment of ours and is left alone", "remove it by hand"))
    return found


def _index(patient: Patient) -> list[Finding]:
    directory = patient.places.store / "index"
    rows, found = patient.index, []
    aside = mend.index_aside(directory)
    way = "it is moved aside, and the store rebuilds it from the footers while it serves"
    reason = None if patient.store_lives else IndexPlace(directory, FileIO()).distrust()
    if rows.trouble:
        # One that a kill left half made, or that a start died of, is thrown away by the next start as it is.
        make = note if (directory / "opening").exists() else fault
        found.append(make("index-damaged", f"the index {directory} can't be trusted: {rows.trouble}", way, aside))
    if rows.unfinished:
        text = f"the index {directory} was being made; it has no format yet"
        found.append(note("index-distrusted", text, "the next start makes it from the footers"))
    elif rows.other_format is not None:
        text = f"the index is of format {rows.other_format}, this version writes {INDEX_FORMAT.decode()}"
        found.append(note("index-format", text, way, aside))
    if rows.damaged:
        text = f"records of the index that fail their CRC: {rows.damaged:,} of {rows.damaged + len(rows.entries):,}"
        found.append(fault("index-record", text, way, aside))
    if reason and not rows.trouble:
        found.append(note("index-distrusted", f"{reason}: the next start rebuilds the index from the footers", way))
    elif rows.rebuilding and not patient.store_lives:
        found.append(note("index-distrusted", "the index was being rebuilt; the next start goes on with it"))
    old = directory.with_name(directory.name + ".damaged")
    if old.exists():
        text = f"{old} is an index that was moved aside ({mend.size_of(old):,} bytes)"
        remove = None if any(finding.mend for finding in found) else mend.remove_tree(old)  # not what is put there now
        found.append(note("index-aside", text, "remove it once nobody wants to look at it", remove))
    return found


def _both_ways(patient: Patient) -> list[Finding]:
    rows, slots = patient.index, patient.segments
    if (
        rows.trouble
        or rows.unfinished
        or rows.other_format is not None
        or any(facts.trouble.startswith("format") for facts in slots.files)
    ):
        return []
    if not rows.there:
        if not slots.footers:
            return []
        text = f"blocks on disk without an index: {len(slots.footers):,}; the next start makes it from their footers"
        return [note("index-distrusted", text)]
    entries = [Entry._make(item) for item in rows.entries.tolist()]
    contradictions = _contradictions(entries, slots)
    orphans = [] if rows.rebuilding or rows.damaged else _orphans(entries, slots)  # else they may be named after all
    bad = [slot for slot in slots.bad if any(True for _ in _paths(slots, slot))]
    if patient.store_lives and (contradictions or orphans or bad):
        contradictions, orphans, bad = _looked_at_again(patient, contradictions, orphans, bad)
    found = _told(patient, slots, contradictions)
    if bad:
        text = f"blocks on disk that fail their checksums: {len(bad):,} (slots {_some(bad)})"
        way = "they are dropped; loads see misses, never their bytes"
        found.append(fault("slot-payload", text, way, mend.drop_slots(patient, bad)))
    if orphans:
        text = f"slots that hold bytes and that the index does not name: {len(orphans):,} ({_some(orphans)})"
        way = "a kill between bytes and index, or in a delete, leaves them; the next start sweeps them"
        found.append(note("slot-orphan", text, way, mend.sweep(patient, orphans)))
    broken = _chains(entries, patient)
    if broken:
        text = f"blocks on disk whose parent no tier holds: {broken:,}; they can't be found and age out"
        found.append(note("chain-broken", text))
    return found


Contradictions = dict[str, list[Entry]]


def _contradictions(entries: Iterable[Entry], slots: Segments) -> Contradictions:
    """Entries by what is wrong with them."""
    wrong: Contradictions = {"segment-missing": [], "index-dangling": [], "slot-footer": [], "index-double": []}
    entries = list(entries)
    claims = Counter(entry.slot for entry in entries)
    torn = {*slots.torn, *slots.bad}
    for entry in entries:
        footer = slots.footers.get(entry.slot)
        if entry.slot >> SLOT_BITS in slots.unreadable:
            continue  # what can be read again tomorrow is not dropped today
        if entry.slot >> SLOT_BITS not in slots.numbers:
            wrong["segment-missing"].append(entry)
        elif footer == footer_of(entry):
            continue
        elif claims[entry.slot] > 1:
            wrong["index-double"].append(entry)
        elif footer is None and entry.slot not in torn:
            wrong["index-dangling"].append(entry)
        else:
            wrong["slot-footer"].append(entry)
    return {name: found for name, found in wrong.items() if found}


def _orphans(entries: Iterable[Entry], slots: Segments) -> list[int]:
    named = {entry.slot for entry in entries}
    return sorted(slot for slot in (*slots.footers, *slots.torn) if slot not in named)


def _looked_at_again(
    patient: Patient, contradictions: Contradictions, orphans: list[int], bad: list[int]
) -> tuple[Contradictions, list[int], list[int]]:
    """What is still so, of the same blocks: a store that lives saves and deletes while we read."""
    directory = patient.places.store
    rows: IndexRows = read_index(directory / "index", live=True)
    slots = read_segments(directory / "segments", payloads=False)
    entries = [Entry._make(item) for item in rows.entries.tolist()]
    named = {entry.slot for entry in entries}
    before = {name: {e[:-1] for e in found} for name, found in contradictions.items()}  # recency may have changed
    again = {
        name: [e for e in found if e[:-1] in before.get(name, ())]
        for name, found in _contradictions(entries, slots).items()
    }
    first = patient.segments.footers
    kept = [s for s in orphans if s not in named and s in slots.footers and slots.footers[s] == first.get(s)]
    sick = [s for s in bad if s in first and any(still_bad(path, first[s]) for path in _paths(patient.segments, s))]
    return {name: found for name, found in again.items() if found}, kept, sick


def _told(patient: Patient, slots: Segments, contradictions: Contradictions) -> list[Finding]:
    found = []
    for name, entries in contradictions.items():
        count, way = f"{len(entries):,}", "the entries are dropped: a miss each"
        drop = mend.drop_entries(patient, entries)
        if name == "segment-missing":
            gone = sorted({entry.slot >> SLOT_BITS for entry in entries})
            text = f"entries of the index in segments that are gone ({_some(gone)}): {count}"
        elif name == "index-double":
            text = f"entries of the index that name a slot of another: {count}"
        elif name == "index-dangling":
            text = f"entries of the index that name slots in which nothing lies: {count}"
        else:
            text = f"slots without the footer that the index expects: {count} ({_some(e.slot for e in entries)})"
        make = warning if name == "index-dangling" else fault
        found.append(make(name, text, way, drop))
    return found


def _chains(entries: Iterable[Entry], patient: Patient) -> int:
    """Blocks whose parent neither tier holds."""
    entries = list(entries)
    held = {entry.identity for entry in entries} | patient.host_identities
    return sum(1 for entry in entries if entry.parent not in held and entry.parent != entry.root)


def _paths(slots: Segments, slot: int) -> Iterable[Path]:
    return (facts.path for facts in slots.files if facts.number == slot >> SLOT_BITS)


def _some(numbers: Iterable[int]) -> str:
    """The first few of many."""
    listed = list(numbers)
    return ", ".join(map(str, listed[:4])) + (", ..." if len(listed) > 4 else "")


def _space(patient: Patient) -> list[Finding]:
    slots, config = patient.segments, patient.config.store
    found = []
    index = patient.places.store / "index" / "data.mdb"
    index_bytes = index.stat().st_blocks * 512 if index.exists() else 0
    counted = sum(facts.counted for facts in slots.files) + index_bytes
    taken = sum(facts.allocated for facts in slots.files) + index_bytes
    if not patient.store_lives and taken > counted + SLACK_BYTES + counted // 64:
        text = f"the file system gives the segments {taken:,} bytes, their slots account for {counted:,}"
        found.append(note("disk-space", text, "a file system that can't punch holes keeps the space for new blocks"))
    largest = max((padded(footer.length) for footer in slots.footers.values()), default=0)
    if counted > config.disk_bytes + largest + SLACK_BYTES:
        text = f"the disk tier takes {counted:,} bytes, store.disk_bytes allows {config.disk_bytes:,}"
        found.append(warning("disk-space", text, "it shrinks as blocks are evicted, or raise store.disk_bytes"))
    try:
        facts = os.statvfs(patient.places.store)
    except OSError:
        return found
    free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    if free < config.disk_floor * total and config.disk_bytes:
        text = f"{free:,} bytes are free, store.disk_floor keeps {int(config.disk_floor * total):,}: nothing is saved"
        found.append(warning("disk-floor", text, "free some space on the file system, or lower store.disk_floor"))
    return found
