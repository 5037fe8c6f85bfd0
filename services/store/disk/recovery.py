"""What lies on disk, told batch by batch after open, while the tier serves.

First the index: each entry claims its slot; one whose slot is a hole, not there, or claimed already is dropped.
Then the slots that nobody claimed: orphans of a crash between bytes and index, or in a delete. They are swept;
or, when the index had to be begun anew, their footers become the index.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from services.store.disk.block import footer_of
from services.store.disk.footer import Footer
from services.store.disk.index import REBUILDING, DiskIndex
from services.store.disk.index_record import ENTRY, Entry, pack_value
from services.store.disk.segments import SegmentFiles
from shared.scope import Scope


class Recovery:
    """Not thread-safe: the tier calls it under its lock."""

    def __init__(self, index: DiskIndex, files: SegmentFiles) -> None:
        """An index begun anew beside slots that hold bytes is rebuilt; so is one whose rebuild was cut short."""
        self._index = index
        self._files = files
        self._counters: Counter[str] = Counter()
        self._new: set[int] = set()
        self._contested: set[int] = set()
        self._after: bytes | None = None
        self._swept = -1
        self._indexed = False
        self._started = False
        self._rebuild = index.get_meta(REBUILDING) is not None
        if self._rebuild and not files.unknown(limit=1):
            index.apply(meta={REBUILDING: None})  # nothing to go through, as in a new tier
            self._rebuild = False
        self.state = "rebuilding" if self._rebuild else "recovering"

    def saved(self, entries: Iterable[Entry]) -> None:
        """Blocks saved meanwhile: their slots are claimed already."""
        if self.state != "ready":
            self._new.update(entry.slot for entry in entries)

    def take_counters(self) -> Counter[str]:
        """What was found since the last call."""
        counters, self._counters = self._counters, Counter()
        return counters

    def step(self, limit: int) -> "np.ndarray[Any, Any] | None":
        """The next batch of entries (dtype ENTRY, perhaps empty), None when there are no more."""
        if self.state == "ready":
            return None
        if not self._started:
            self._index.scan_begins()
            self._started = True
        if not self._indexed:
            return self._claim(limit)
        slots = self._files.unknown(self._swept, limit if self._rebuild else 1 << 30)
        if slots:
            batch = self._adopt_footers(slots) if self._rebuild else self._sweep(slots)
            self._swept = slots[-1]
            return batch
        self._index.apply(meta={REBUILDING: None})
        self._index.sync()
        self.state = "ready"
        self._new.clear()
        return None

    def _claim(self, limit: int) -> "np.ndarray[Any, Any]":
        rows = self._index.scan(self._after, limit)
        entries = rows.entries
        dangling = []
        for position in self._files.adopt(entries["slot"]):
            entry = Entry._make(entries[position].item())
            if self._files.footer(entry.slot) == footer_of(entry) and self._files.in_use(entry.slot):
                if entry.slot not in self._new:
                    self._contested.add(entry.slot)
            else:
                dangling.append(position)
        if dangling or rows.damaged:
            self._index.apply(deletes=entries[dangling]["identity"].tolist() + rows.damaged)
            self._counters["dangling_entries"] += len(dangling)
            self._counters["damaged_entries"] += len(rows.damaged)
            entries = np.delete(entries, dangling)
        self._after = rows.last
        if rows.last is None:
            self._settle()
            self._indexed = True
            self._index.scan_ends()
        return entries

    def _settle(self) -> None:
        """Slots that an entry claimed which is not their block's, before the rightful one came: its entry goes."""
        last: bytes | None = None
        while self._contested:
            rows = self._index.scan(last, 8192)
            suspects = rows.entries[np.isin(rows.entries["slot"], list(self._contested))]
            entries = [Entry._make(item) for item in suspects.tolist()]
            wrong = [e.identity for e in entries if self._files.footer(e.slot) != footer_of(e)]
            self._index.apply(deletes=wrong)
            self._counters["dangling_entries"] += len(wrong)
            last = rows.last
            if last is None:
                break

    def _sweep(self, slots: list[int]) -> "np.ndarray[Any, Any]":
        self._files.free(slots)
        self._counters["swept_orphans"] += len(slots)
        return np.empty(0, ENTRY)

    def _adopt_footers(self, slots: list[int]) -> "np.ndarray[Any, Any]":
        best: dict[bytes, Footer] = {}
        for footer in self._files.footers(slots):
            if footer is None:
                continue
            other = best.get(footer.identity)
            if other is None or footer.generation > other.generation:
                best[footer.identity] = footer
        puts = []
        for identity, footer in best.items():
            held = self._index.get(identity)
            if held is None or (held.slot not in self._new and footer.generation > held.generation):
                puts.append(Entry(identity, footer.parent, footer.root, footer.slot, *footer[4:], 0))
        gone = self._index.apply(puts)
        kept = [entry.slot for entry in puts]
        self._files.adopt(kept)
        self._files.free([*(set(slots) - set(kept)), *(entry.slot for entry in gone)])
        self._counters["rebuilt_entries"] += len(puts)
        self._counters["swept_orphans"] += len(slots) - len(puts)
        return np.frombuffer(b"".join(entry.identity + pack_value(entry)[:-4] for entry in puts), dtype=ENTRY)

    def strays(self, scope: Scope) -> list[Footer]:
        """Blocks of a scope in slots that nobody has claimed yet, which a rebuild would bring back; of a line, all of
        its root, since they may continue it. Without a rebuild there are none: what the index does not name is swept.
        """
        if self.state != "rebuilding":
            return []
        footers = self._files.footers(self._files.unknown())
        return [footer for footer in footers if footer is not None and scope.covers(footer.root)]
