"""Runs of neighbouring slots, read and written in one call each, payloads in their own memory where it is aligned."""

from collections import Counter
from collections.abc import Iterator, Sequence

import xxhash

from services.store.disk.footer import MAX_SLOTS, PAGE, Footer, pack_footer, unpack_footer
from services.store.disk.scratch import ScratchPool, is_aligned
from services.store.disk.segment_file import SegmentFile

RUN_BYTES = 4 << 20
"""Neighbours are read and written in calls of up to this many bytes."""

_FAULTS = {
    "short_reads": "the file ends before the block does",
    "footer_mismatches": "the slot holds no such block: overwritten, swapped or damaged",
    "checksum_mismatches": "the bytes are not those that were written",
}

_MAX_PARTS = 1024
"""IOV_MAX of Linux: a slot takes two parts."""


def cut_runs(slots: Sequence[int], slot_bytes: int) -> Iterator[list[int]]:
    """Ascending slots of one size, cut into runs of neighbours that one call can take."""
    longest = max(1, min(RUN_BYTES // slot_bytes, _MAX_PARTS // 2))
    run: list[int] = []
    for slot in slots:
        if run and (slot != run[-1] + 1 or slot % MAX_SLOTS == 0 or len(run) >= longest):
            yield run
            run = []
        run.append(slot)
    if run:
        yield run


class SlotIO:
    """Thread-safe; `counters` belong to the owner."""

    def __init__(self, counters: Counter[str]) -> None:
        self.scratch = ScratchPool(RUN_BYTES)
        self.last_fault = ""
        self._counters = counters

    def write_run(self, segment: SegmentFile, run: list[int], blocks: list[tuple[Footer, memoryview]]) -> None:
        """Payloads and footers in one call; OSError of the kernel."""
        size = segment.payload_bytes
        as_they_are = all(len(payload) == size and (not segment.direct or is_aligned(payload)) for _, payload in blocks)
        with self.scratch.borrow(len(run) * (PAGE if as_they_are else segment.slot_bytes)) as scratch:
            parts: list[memoryview] = []
            if as_they_are:
                for position, (footer, payload) in enumerate(blocks):
                    page = scratch[position * PAGE : (position + 1) * PAGE]
                    page[:] = pack_footer(footer)
                    parts += [payload, page]
            else:
                for position, (footer, payload) in enumerate(blocks):
                    at = position * segment.slot_bytes
                    kept = min(len(payload), size)
                    scratch[at : at + kept] = payload[:kept]
                    scratch[at + kept : at + size] = bytes(size - kept)
                    scratch[at + size : at + segment.slot_bytes] = pack_footer(footer)
                parts.append(scratch[: len(run) * segment.slot_bytes])
            segment.write(parts, segment.offset(run[0] & (MAX_SLOTS - 1)))

    def read_run(self, segment: SegmentFile, run: list[int], pairs: list[tuple[Footer, memoryview]]) -> list[bool]:
        """Payloads into the buffers in one call; whether each is the block that its footer here says."""
        size = segment.payload_bytes
        as_they_are = all(len(buffer) == size and (not segment.direct or is_aligned(buffer)) for _, buffer in pairs)
        with self.scratch.borrow(len(run) * (PAGE if as_they_are else segment.slot_bytes)) as scratch:
            step = PAGE if as_they_are else segment.slot_bytes
            pages = [scratch[(n + 1) * step - PAGE : (n + 1) * step] for n in range(len(run))]
            parts = [p for pair, page in zip(pairs, pages, strict=True) for p in (pair[1], page)]
            try:
                whole = len(run) * segment.slot_bytes
                at = segment.offset(run[0] & (MAX_SLOTS - 1))
                got = segment.read(parts if as_they_are else [scratch[:whole]], at)
            except OSError as error:
                self._counters["read_errors"] += 1
                self.last_fault = f"{segment.path.name}: {error.strerror or error}"
                if len(run) == 1:
                    return [False]  # below: one bad sector must not cost its neighbours
                return [self.read_run(segment, [s], [p])[0] for s, p in zip(run, pairs, strict=True)]
            self._counters["read_bytes"] += got
            held = []
            for position, (footer, buffer) in enumerate(pairs):
                if not as_they_are:
                    payload = scratch[position * step : position * step + min(size, len(buffer))]
                    buffer[: len(payload)] = payload
                there = got >= (position + 1) * segment.slot_bytes
                fault = self._fault(footer, bytes(pages[position]), buffer) if there else "short_reads"
                held.append(fault is None)
                if fault is not None:
                    self._counters[fault] += 1
                    self.last_fault = f"{segment.path.name}: {_FAULTS[fault]}"
            return held

    def _fault(self, footer: Footer, page: bytes, buffer: memoryview) -> str | None:
        if unpack_footer(page, footer.slot) != footer:
            return "footer_mismatches"
        if xxhash.xxh3_64_intdigest(buffer[: footer.length]) != footer.checksum:
            return "checksum_mismatches"
        return None
