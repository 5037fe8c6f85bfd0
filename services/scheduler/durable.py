"""The journal and the ledger with their threads, as the shell uses them: write before emit, sync behind.

write(records)   event loop: one write, then the ledger is told     False: nothing may be emitted, try again
sync loop        a thread, each second: fdatasync, removal of segments
ledger loop      another thread, each second: one transaction (it may wait for readers, the journal must not)
"""

import time
from collections.abc import Callable, Iterable

import trio

from services.scheduler.journal import Journal, JournalError, JournalFull, Recovered
from services.scheduler.journal_fold import keys_of
from services.scheduler.ledger import Ledger
from services.scheduler.records import Accept, AnyRecord, Step
from shared.config import Config
from shared.faults import FaultInjected, Faults
from shared.paths import PlaceError, Places

SYNC_S = 1.0
LEDGER_S = 1.0


class Durable:
    """Owns journal and ledger. `complain(why, detail)` is told of troubles; `reason` says why writes fail now."""

    def __init__(self, places: Places, config: Config, faults: Faults, complain: Callable[[str, str], None]) -> None:
        self.journal = Journal(places.journal)
        self.ledger = Ledger(places.ledger, keep_h=config.ledger.keep_h)
        self._faults = faults
        self._complain = complain
        self._closed = False
        self.keeps = config.bench.durable
        """False, in a benchmark only: whatever should be written counts as written."""
        self._syncing = trio.CapacityLimiter(1)
        self._filling = trio.CapacityLimiter(1)
        self.reason = ""
        self.slowest_write_s = 0.0
        """The longest that a journal write has held up the event loop; a kernel that throttles writers shows here."""

    async def recover(self) -> Recovered:
        """What earlier lives promised; PlaceError when it can't be read or continued. Waits for room to continue it."""
        while True:
            try:
                found = await trio.to_thread.run_sync(self.journal.recover)
                break
            except JournalFull as error:
                self._complain("journal", error.reason)
                await trio.sleep(SYNC_S)
            except JournalError as error:
                raise PlaceError(error.reason) from error
        for loss in found.losses:
            self._complain("journal_loss", loss)
        self.ledger.observe(found.records)
        return found

    def retain(self, records: Iterable[AnyRecord], retained: Iterable[str]) -> None:
        """After a recovery: requests whose retention is over are forgotten, so that their segments can go."""
        records = list(records)
        last = {record.id: record.key for record in records if isinstance(record, Accept)}
        keys = keys_of(records)
        for key in keys - {last[id] for id in retained}:
            self.journal.forget(key)

    def write(self, records: list[AnyRecord]) -> bool:
        """Puts a batch on file. False: not one of them is, nothing of the batch may be emitted, call again later."""
        if self._closed:
            return False
        if not self.keeps:
            return True
        accepts = any(isinstance(record, Accept) for record in records)
        steps = any(isinstance(record, Step) for record in records)
        try:
            if accepts:
                self._faults.at("journal_before_accept")
            if steps:
                self._faults.at("scheduler_before_step")
            begun = time.perf_counter()
            self.journal.append(records)
            self.slowest_write_s = max(self.slowest_write_s, time.perf_counter() - begun)
        except (JournalError, FaultInjected) as error:
            self.reason = str(error)
            self._complain("journal", self.reason)
            return False
        self.reason = ""
        self.ledger.observe(records)
        if accepts:
            self._faults.at("journal_after_accept")
        if steps:
            self._faults.at("scheduler_after_step")
        return True

    def refusal(self) -> str:
        """Why no new request should be promised now; "" when one may be."""
        return self.reason or self.journal.refusal() or ""

    async def sync_for_ever(self) -> None:
        """Bounds what a power loss can take to about a second."""
        while True:
            await trio.sleep(SYNC_S)
            try:
                await trio.to_thread.run_sync(self.journal.sync, limiter=self._syncing)
            except JournalError as error:
                self._complain("journal_sync", error.reason)

    async def fill_ledger_for_ever(self) -> None:
        """Rows of finished requests, in batches."""
        while True:
            await trio.sleep(LEDGER_S)
            if not await trio.to_thread.run_sync(self.ledger.flush, time.time(), limiter=self._filling):
                self._complain("ledger", self.ledger.reason)

    async def close(self) -> None:
        """Syncs what is written, fills the ledger, takes no more; idempotent."""
        self._closed = True
        try:
            await trio.to_thread.run_sync(self.journal.close, limiter=self._syncing)
        except JournalError as error:
            self._complain("journal_sync", error.reason)
        await trio.to_thread.run_sync(self.ledger.close, time.time(), limiter=self._filling)
