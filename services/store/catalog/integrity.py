"""The catalogue checked against itself, against the header tables, and against what its words promise."""

import numpy as np

from services.store.arena.records import FLAG_CLEAN, VALID
from services.store.catalog.catalog import Catalog
from services.store.catalog.entries import DETACHED, LIVE, ON_DISK, SUSPECT
from services.store.catalog.order import NONE
from services.store.catalog.slots import CLEAN, DIRTY, FREE, GRANTED, QUARANTINED, STAGING


def check_integrity(catalog: Catalog, *, writing: int = 0) -> None:
    """AssertionError with the numbers. `writing`: blocks that are out in write batches now. O(entries + slots)."""
    catalog.blocks.slots.check_integrity()
    catalog.blocks.entries.host_order.check_integrity()
    catalog.blocks.entries.disk_order.check_integrity()
    live = np.flatnonzero(catalog.blocks.entries.columns["flags"]).tolist()
    assert len(live) == catalog.blocks.entries.live, f"{len(live)} live, {catalog.blocks.entries.live} counted"
    for entry in live:
        _check_entry(catalog, entry)
    _check_counts(catalog, live, writing)
    _check_headers(catalog)


def check_conservation(catalog: Catalog) -> None:
    """AssertionError when slots, entries and names do not add up. In numpy: ten milliseconds for a million blocks."""
    slots, entries = catalog.blocks.slots, catalog.blocks.entries
    states, span = slots.columns["state"], catalog.blocks.headers.geometry.slot_span
    for extent, size in enumerate(slots.extent_size):
        total = catalog.blocks.headers.count(extent) if size >= 0 else 0
        part = states[extent * span : extent * span + total]
        held = int(np.count_nonzero(part != FREE))
        assert held == slots.in_extent[extent], f"extent {extent}: {held} held, {slots.in_extent[extent]} counted"
    for size in range(len(slots.sizes)):
        mine = [extent for extent, owner in enumerate(slots.extent_size) if owner == size]
        free = sum(catalog.blocks.headers.count(extent) - slots.in_extent[extent] for extent in mine)
        assert free == slots.free_slots(size), f"class {size}: {free} free, {slots.free_slots(size)} counted"
    used = np.flatnonzero(states)
    assert len(used) == slots.used, f"{len(used)} slots are not FREE, {slots.used} counted"
    resting = used[states[used] != QUARANTINED]
    lost = resting[entries.columns["host"][slots.columns["entry"][resting]] != resting]
    assert not len(lost), f"slots {lost[:8].tolist()} hold blocks that lie elsewhere"
    flags = entries.columns["flags"][: entries.top]
    live, named = int(np.count_nonzero(flags)), int(np.count_nonzero(flags & (LIVE | DETACHED) == LIVE))
    assert live == entries.live, f"{live} live, {entries.live} counted"
    assert named == len(entries.map), f"the map holds {len(entries.map)} names, {named} entries have one"


def _check_entry(catalog: Catalog, entry: int) -> None:
    blocks, entries, slots = catalog.blocks, catalog.blocks.entries, catalog.blocks.slots
    flags, slot, pins = entries.flags[entry], entries.host[entry], entries.pins[entry]
    name = f"entry {entry} ({entries.identity(entry).hex()[:8]})"
    assert flags & LIVE, f"{name} has flags {flags}"
    state = slots.state[slot] if slot != NONE else None
    if flags & DETACHED:
        assert pins, f"{name} is detached, unpinned and still here"
        assert entries.parent[entry] == NONE, f"{name} is detached and has a parent"
        assert not entries.children[entry], f"{name} is detached and has children"
    else:
        assert entries.map.get(entries.identity(entry)) == entry, f"{name} is not found by its name"
        parent = entries.parent[entry]
        if parent != NONE:
            assert entries.flags[parent] & LIVE, f"{name}: its parent {parent} is gone"
            assert not entries.flags[parent] & DETACHED, f"{name}: its parent {parent} is detached"
            assert entries.root[parent] == entries.root[entry], f"{name}: its parent has another root"
        assert state is not None or flags & ON_DISK, f"{name} is on no tier"
    if state is None:
        assert flags & (ON_DISK | DETACHED), f"{name} has no slot and is not on disk"
    else:
        assert slots.entry[slot] == entry, f"{name}: slot {slot} belongs to entry {slots.entry[slot]}"
        allowed = (GRANTED, STAGING, DIRTY, CLEAN, QUARANTINED)
        assert state in allowed, f"{name}: slot {slot} is in state {state}"
        if not flags & DETACHED:
            clean = bool(flags & ON_DISK)
            assert state not in (DIRTY, CLEAN) or clean == (state == CLEAN), f"{name}: state {state}, on disk {clean}"
            assert (state == QUARANTINED) == bool(flags & SUSPECT), f"{name}: state {state}, flags {flags}"
    in_host, in_disk = entry in entries.host_order, entry in entries.disk_order
    assert in_host == (not pins and state is not None), f"{name}: pins {pins}, state {state}, in host order {in_host}"
    assert in_disk == bool(not pins and flags & ON_DISK), f"{name}: pins {pins}, flags {flags}, in disk order {in_disk}"
    assert pins or state not in (GRANTED, STAGING, QUARANTINED), f"{name}: unpinned in state {state}"
    if in_host:
        assert blocks.slots.extent_size[slot // blocks.headers.geometry.slot_span] >= 0


def _check_counts(catalog: Catalog, live: list[int], writing: int) -> None:
    entries, slots = catalog.blocks.entries, catalog.blocks.slots
    parents = entries.columns["parent"][live]
    children = np.bincount(parents[parents != NONE].astype(np.int64), minlength=entries.top)
    wrong = [entry for entry in live if children[entry] != entries.children[entry]]
    assert not wrong, f"entries {wrong} count {[entries.children[e] for e in wrong]} children, have {children[wrong]}"
    named = sum(1 for entry in live if not entries.flags[entry] & DETACHED)
    assert len(entries.map) == named, f"the map holds {len(entries.map)} names, {named} entries have one"
    leased = sum(entry != NONE for lease in catalog.leases.open.values() for entry in lease.entries)
    ours = int(np.isin(slots.columns["state"], (GRANTED, STAGING)).sum())
    pins = sum(entries.pins[entry] for entry in live)
    assert pins == leased + ours + writing, f"{pins} pins; {leased} leased + {ours} granted or staging + {writing}"


def _check_headers(catalog: Catalog) -> None:
    """What a restart would find is what we hold."""
    entries, slots = catalog.blocks.entries, catalog.blocks.slots
    found = catalog.blocks.headers.recover()
    told = {int(record["slot"]): record for record in found}
    for slot in np.flatnonzero(slots.columns["state"]).tolist():
        state, entry = slots.state[slot], slots.entry[slot]
        visible = not entries.flags[entry] & DETACHED and state in (DIRTY, CLEAN)
        record = told.pop(slot, None)
        if visible:
            assert record is not None, f"slot {slot} holds a block, its header says FREE"
            assert record["state"] == VALID, f"slot {slot} holds a block, its header is in state {record['state']}"
            assert record["identity"].tobytes() == entries.identity(entry), f"slot {slot}: header names another block"
            assert int(record["checksum"]) == slots.checksum[slot], f"slot {slot}: header has another checksum"
            assert bool(record["flags"] & FLAG_CLEAN) == (state == CLEAN), f"slot {slot}: clean flag is wrong"
        elif state in (GRANTED, STAGING):
            assert record is not None, f"slot {slot} is granted, its header says FREE"
            assert record["state"] != VALID, f"slot {slot} is granted, its header says VALID"
        else:
            assert record is None, f"slot {slot} is in state {state}, its header names a block"
        if record is not None:
            assert int(record["generation"]) == slots.generation[slot], f"slot {slot}: generations differ"
    assert not told, f"headers of slots {sorted(told)} name blocks that the catalogue does not know"
