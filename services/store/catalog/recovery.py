"""The catalogue after a restart: from the arena's headers and the disk's index, in numpy, a microsecond a block.

    headers ─► adopt_host      VALID: held; GRANTED to an engine: out of use until that engine speaks;
                               GRANTED to ourselves (a read that died with us): freed
    index   ─► adopt_disk      batches in any order; what the host holds too becomes clean
            ─► finish          parents linked, orders by recency, dirty blocks queued, free lists

A damaged index is told late, while the store serves already: then `adopt_disk_live` takes the same batches.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.store.arena.records import FLAG_CLEAN, FLAG_DOOMED, VALID
from services.store.catalog.catalog import Catalog
from services.store.catalog.entries import LIVE, ON_DISK
from services.store.catalog.identity_table import Identities, first_words
from services.store.catalog.order import NONE
from services.store.catalog.rebuild import rebuild_orders
from services.store.catalog.slots import CLEAN, DIRTY, GRANTED

_VALID_STATES = (DIRTY, CLEAN)
ALL = slice(None)
FEW_ROOTS = 16
MOST_WORD = np.uint64(0xFFFFFFFFFFFFFFFF)


def _bytes32(column: NDArray[Any]) -> Identities:
    """A column of 32-byte values, void or u1[32] -> [n, 32]."""
    return np.ascontiguousarray(column).view(np.uint8).reshape(-1, 32)


def _equal(some: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Row by row, of four words."""
    same: NDArray[np.bool_] = some[:, 0] == others[:, 0]
    for word in (1, 2, 3):
        same &= some[:, word] == others[:, word]
    return same


def _distinct(rows: Identities) -> NDArray[np.bool_]:
    """Which rows are the first of their kind."""
    first = np.ones(len(rows), bool)
    words = first_words(rows)
    if (words[1:] > words[:-1]).all():  # the index tells its rows in this order
        return first
    words = np.sort(words)
    if not (words[1:] == words[:-1]).any():
        return first
    seen: dict[bytes, int] = {}
    for index, row in enumerate(rows):
        first[index] = seen.setdefault(row.tobytes(), index) == index
    return first


class Recovery:
    """Fills a catalogue that holds nothing yet."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._blocks = catalog.blocks
        self._entries = catalog.blocks.entries
        self._slots = catalog.blocks.slots
        self._expected = 0
        self._told: list[tuple[NDArray[np.uint32], Identities, NDArray[np.uint32]]] = []
        """Rows that were added, the names of their parents, their slots: first those of the host, then of the disk."""
        self._hosted = (np.empty(0, np.uint64), np.empty(0, np.uint32))
        """First words of the names that the host has told, ascending, and their rows."""
        self._last_word = np.uint64(0)
        self._late: list[tuple[bytes, bytes]] = []

    def expect(self, blocks: int) -> None:
        """The disk will tell about so many: room is made at once, instead of bit by bit."""
        self._expected = blocks

    # --- host ------------------------------------------------------------------------------------------------

    def adopt_host(self) -> None:
        """Reads the header tables."""
        found = self._blocks.headers.recover()
        dead_read = (found["state"] != VALID) & (found["engine"] == 0)
        doomed = (found["state"] != VALID) & (found["flags"] & FLAG_DOOMED != 0)
        self._blocks.headers.free_many(found["slot"][dead_read])
        nameless = found[doomed & ~dead_read]
        named = found if not (doomed | dead_read).any() else found[~doomed & ~dead_read]
        if not _distinct(_bytes32(named["identity"])).all():  # VALID before GRANTED, the newer before the older
            named = named[np.lexsort((-named["generation"].astype(np.int64), named["state"] != VALID))]
            keep = _distinct(_bytes32(named["identity"]))
            self._blocks.headers.free_many(named["slot"][~keep])
            named = named[keep]
        self._entries.reserve_rows(len(found) + self._expected)
        self._entries.map.reserve(len(found) + self._expected)
        entries = self._add(named)
        self._hold(entries, named)
        words = first_words(_bytes32(named["identity"]))
        order = np.argsort(words)
        self._hosted = words[order], entries[order]
        for record in nameless:
            self._hold_nameless(record)
        self._blocks.tick = int(found["recency"].max(initial=0)) + 1

    def _add(self, records: NDArray[Any], chosen: NDArray[Any] | slice = ALL) -> NDArray[np.uint32]:
        """Rows for the chosen records (fields identity, parent, root, length, recency); in the map, not linked yet.

        Field by field, so that each byte is copied once.
        """
        table = self._entries
        identities = _bytes32(records["identity"][chosen])
        count = len(identities)
        table.reserve_rows(count)
        entries = np.arange(table.top, table.top + count, dtype=np.uint32)
        part = slice(table.top, table.top + count)
        table.top += count
        table.live += count
        table.identities[part] = identities
        table.columns["length"][part] = records["length"][chosen]
        table.columns["tick"][part] = records["recency"][chosen]
        table.columns["flags"][part] = LIVE
        self._number_roots(_bytes32(records["root"][chosen]), table.columns["root"][part])
        table.map.put_many(identities, entries)
        self._told.append((entries, _bytes32(records["parent"][chosen]), records["slot"][chosen]))
        return entries

    def _number_roots(self, roots: Identities, out: NDArray[Any]) -> None:
        """Mostly there are few, told apart by their first words: comparing with each is cheaper than sorting then."""
        words, firsts = roots.view("<u8"), np.ascontiguousarray(roots.view("<u8")[:, 0])
        left, places = np.ones(len(roots), bool), np.zeros(len(roots), np.intp)
        found: list[int] = []
        while len(found) < FEW_ROOTS and left.any():
            found.append(int(left.argmax()))
            same = firsts == firsts[found[-1]]
            places[same] = len(found) - 1
            left &= ~same
        if left.any() or not _equal(words, np.take(words[found], places, axis=0)).all():
            _, first, places = np.unique(roots, axis=0, return_index=True, return_inverse=True)
            found, places = first.tolist(), places.ravel()
        counts = np.bincount(places, minlength=len(found)).tolist()
        numbers = [
            self._entries.root_number(roots[row].tobytes(), count) for row, count in zip(found, counts, strict=True)
        ]
        out[:] = np.array(numbers, np.uint32)[places]

    def _hold(self, entries: NDArray[np.uint32], records: NDArray[Any]) -> None:
        slots, columns = records["slot"], self._slots.columns
        self._entries.columns["host"][entries] = slots
        granted = records["state"] != VALID
        self._entries.columns["pins"][entries[granted]] = 1
        columns["state"][slots] = np.where(granted, GRANTED, DIRTY)
        columns["entry"][slots] = entries
        for name in ("generation", "checksum", "engine", "epoch"):
            columns[name][slots] = records[name]

    def _hold_nameless(self, record: NDArray[Any]) -> None:
        """A grant whose scope was cleared: the slot is in use, the block will never be."""
        identity = bytes(record["identity"])
        if self._entries.map.get(identity) != NONE:  # its name has a new block already
            identity = b"doomed" + int(record["slot"]).to_bytes(26, "little")
        entry = self._entries.add(identity, NONE, bytes(record["root"]), int(record["length"]))
        self._entries.detach(entry)
        self._hold(np.array([entry], np.uint32), np.array([record], record.dtype))

    # --- disk ------------------------------------------------------------------------------------------------

    def adopt_disk(self, records: NDArray[Any]) -> None:
        """A batch of the disk's index (fields identity, parent, root, length, recency), before `finish`."""
        identities = _bytes32(records["identity"])
        distinct = _distinct(identities)
        if not distinct.all():
            records, identities = records[distinct], identities[distinct]
        known = self._known(identities)
        entries = self._add(records, known == NONE)
        self._entries.columns["flags"][entries] |= ON_DISK
        both = known[known != NONE]
        hosts = self._entries.columns["host"][both]
        held = np.isin(self._slots.columns["state"][hosts], _VALID_STATES)
        self._entries.columns["flags"][both[held]] |= ON_DISK
        self._slots.columns["state"][hosts[held]] = CLEAN
        self._blocks.tick = max(self._blocks.tick, int(records["recency"].max(initial=0)) + 1)

    def _known(self, identities: Identities) -> NDArray[np.uint32]:
        """Rows that these names have already; NONE for those that have none.

        While the disk tells its names in ascending order, only the host can have told one before, and the host has
        few: they are looked for among the batch, instead of each of the batch in the map.
        """
        words = first_words(identities)
        if not len(words) or words[0] <= self._last_word or not (words[1:] > words[:-1]).all():
            self._last_word = MOST_WORD
            return self._entries.map.get_many(identities)
        self._last_word = words[-1]
        hosted, rows = self._hosted
        part = slice(np.searchsorted(hosted, words[0]), np.searchsorted(hosted, words[-1], side="right"))
        at, rows = np.searchsorted(words, hosted[part]), rows[part]
        same = _equal(identities.view("<u8")[at], self._entries.identities.view("<u8")[rows])
        known = np.full(len(words), NONE, np.uint32)
        known[at[same]] = rows[same]
        return known

    def adopt_disk_live(self, records: NDArray[Any]) -> list[bytes]:
        """The same while the store serves; returns identities whose disk copy nobody can use (granted again)."""
        table, unusable = self._entries, []
        for record in records:
            identity, parent = record["identity"].tobytes(), record["parent"].tobytes()
            entry = table.map.get(identity)
            if entry == NONE:
                before = table.map.get(parent)
                entry = table.add(identity, before, record["root"].tobytes(), int(record["length"]))
                table.tick[entry] = int(record["recency"])
                table.flags[entry] |= ON_DISK
                self._blocks.enter(entry)
                if before == NONE:
                    self._late.append((identity, parent))
                continue
            slot = table.host[entry]
            if slot != NONE and self._slots.state[slot] in _VALID_STATES:
                self._blocks.pin(entry)
                self._blocks.set_clean(entry)
                self._blocks.unpin(entry)
            elif slot != NONE and self._slots.state[slot] == GRANTED:
                unusable.append(identity)
            elif slot != NONE:
                table.flags[entry] |= ON_DISK  # being read, or held back: pinned either way
        return unusable

    def finish_live(self) -> None:
        """After the last batch: links blocks that were told before their parents."""
        for identity, parent in self._late:
            entry, before = self._entries.map.get(identity), self._entries.map.get(parent)
            if entry != NONE and before != NONE and self._entries.parent[entry] == NONE:
                self._entries.link(entry, before)
        self._late.clear()

    # --- finish ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The catalogue is complete and may serve."""
        rebuild_orders(self._blocks, self._link())
        self._slots.rebuild_free()
        self._flags()
        states, generations = self._slots.columns["state"], self._slots.columns["generation"]
        dirty = np.flatnonzero(states == DIRTY)
        self._catalog.behind.extend(dirty[np.argsort(generations[dirty], kind="stable")])

    def _link(self) -> NDArray[np.intp]:
        """Parents are found once, when all blocks are known; roots, and orphans, find none.

        Returns the rows in the order of their slots, in which most stand right behind their parents, as blocks are
        saved that way: such a parent need not be looked up.
        """
        table, told = self._entries, self._told
        self._told = []
        names = table.identities.view("<u8")
        none = np.empty(0, np.uint32)
        hosted = [rows for rows, _, _ in told[:1]]  # told in the order of their slots
        on_disk = np.concatenate([none, *(rows for rows, _, _ in told[1:])])
        by_slot = on_disk[np.argsort(np.concatenate([none, *(slots for _, _, slots in told[1:])]))]
        order = np.concatenate([none, *hosted, by_slot])
        before = np.arange(table.top, dtype=np.uint32)  # a guess that is never right
        before[order[1:]] = order[:-1]
        for rows, parents, _ in told:
            found = before[rows]
            wrong = ~_equal(parents.view("<u8"), np.take(names, found, axis=0))
            found[wrong] = table.map.get_many(parents[wrong])
            table.columns["parent"][rows] = found
        parent = table.columns["parent"][: table.top]
        used = (table.columns["flags"][: table.top] != 0) & (parent != NONE)
        table.columns["children"][: table.top] = np.bincount(parent[used], minlength=table.top)
        others = np.ones(table.top, bool)
        others[order] = False
        return np.concatenate((order, np.flatnonzero(others))).astype(np.intp)

    def _flags(self) -> None:
        """The clean flags in the headers say what the index says."""
        for state, flag in ((DIRTY, 0), (CLEAN, FLAG_CLEAN)):
            self._blocks.headers.set_flags_many(np.flatnonzero(self._slots.columns["state"] == state), flag)


def forget_disk(catalog: Catalog, limit: int = 1 << 32) -> int:
    """The disk's index is lost and will be told anew: what only the disk held is unknown until then.

    Host copies become dirty; a read that is under way ends as it will. At most `limit` blocks a call, so that a store
    of millions goes on answering; returns how many are left. Those are misses meanwhile: the disk has no such block.
    """
    flags = catalog.blocks.entries.columns["flags"][: catalog.blocks.entries.top]
    on_disk = np.flatnonzero((flags & LIVE != 0) & (flags & ON_DISK != 0))
    _forget_many(catalog, on_disk, on_disk[:limit].tolist())
    return max(0, len(on_disk) - limit)


def forget_on_disk(catalog: Catalog, identities: Sequence[bytes]) -> None:
    """The disk has lost these blocks: what the host holds of them is to be written again."""
    entries = catalog.blocks.entries
    known = [entry for entry in map(entries.map.get, identities) if entry != NONE and entries.flags[entry] & ON_DISK]
    catalog.blocks.counters.disk_failures += len(known)
    _forget_many(catalog, np.array(known, np.intp), known)


def _forget_many(catalog: Catalog, doomed: "NDArray[np.intp]", now: Sequence[int]) -> None:
    """Drops the disk copies of `now`. Links of all that `doomed` leaves on no tier are cut at once: one by one, each
    would be searched for among all blocks.
    """
    entries = catalog.blocks.entries
    flags, hosts, parents = (entries.columns[name][: entries.top] for name in ("flags", "host", "parent"))
    goes = np.zeros(entries.top, bool)
    goes[doomed] = hosts[doomed] == NONE
    linked = np.flatnonzero((flags & LIVE != 0) & (parents != NONE))
    cut = linked[goes[parents[linked]] | goes[linked]]
    np.subtract.at(entries.columns["children"], parents[cut], np.uint32(1))
    parents[cut] = NONE
    for entry in now:
        _forget(catalog, entry)


def _forget(catalog: Catalog, entry: int) -> None:
    blocks = catalog.blocks
    slot = blocks.entries.host[entry]
    blocks.drop_disk(entry)
    if slot != NONE and blocks.slots.state[slot] == DIRTY:
        catalog.behind.push(slot)


def recover(catalog: Catalog, disk_batches: "list[NDArray[Any]] | None" = None) -> None:
    """All of it in one call, for a catalogue over headers that exist already."""
    recovery = Recovery(catalog)
    recovery.adopt_host()
    for batch in disk_batches or []:
        recovery.adopt_disk(batch)
    recovery.finish()
