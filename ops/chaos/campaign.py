"""One campaign: an undisturbed run, then strikes and checkpoints on one stack, until all kills are done."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import trio

from ops.admin import admin
from ops.chaos.assault import Assault, Broken, Tally
from ops.chaos.customers import Customers, Totals, Violation
from ops.chaos.inspection import Inspection, crashes, ledger_gaps, lives, wait_balanced, wait_saved
from ops.chaos.mix import Item, Mix
from ops.chaos.models import Oracle, Subject, catalogue
from ops.chaos.schedule import WEATHERS, Strike, schedule
from ops.chaos.volume import Volume
from ops.client import connected
from ops.doctor.exam import examine
from ops.doctor.report import Level
from ops.doctor.running import Told, ask
from ops.stack import Stack
from shared.config import load_config
from shared.messages.store import ClearCache, Cleared
from shared.node import Node
from shared.peers import DeadlinePassed, PeerGone, PeerSlow, RequestFailed

CHECK_EVERY = 25
"""Strikes between two checkpoints; they last less than a request's result is kept."""
CLEAR_EVERY = 3
"""Checkpoints between two that clear the cache."""
CLEAR_S = 60.0
WARM_UP_S = 2.0


@dataclass
class Campaign:
    """`stack` is empty and stays so after `run`; `violations` empty means that every promise held."""

    stack: Stack
    subject: Subject
    seed: int
    kills: int
    minutes: float
    say: Callable[[str], None]
    volume: Volume | None = None
    weathers: Sequence[str] = WEATHERS
    violations: list[Violation] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    totals: Totals = field(default_factory=Totals)
    largest: dict[str, int] = field(default_factory=dict)
    near_ties: int = 0
    checkpoints: int = 0
    seconds: float = 0.0
    _read: int = 0

    async def run(self) -> None:
        """Ends at the first checkpoint that finds a violation."""
        begun = time.monotonic()
        oracle = Oracle(self.subject)
        items, long_items = await self._undisturbed(oracle)
        async with admin(self.stack.places) as node:
            assault = Assault(self.stack, self.subject, node, self.say, self.volume)
            self.tally = assault.tally
            mix = Mix(self.seed, items, long_items)
            customers = Customers(self.stack.places, self.subject, oracle, mix, lives)
            self.violations, self.totals = customers.violations, customers.totals
            inspection = Inspection(self.stack, largest=self.largest)
            try:
                await assault.start("calm" if "calm" in self.weathers else self.weathers[0])
                async with trio.open_nursery() as weather:
                    weather.start_soon(assault.tides)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(customers.run)
                        await self._strikes(assault, customers, inspection, node, begun)
                        customers.send_home()
                    weather.cancel_scope.cancel()
                if self.volume is not None:
                    self.volume.relieve()
                await assault.stop()
                await self._doctor(customers)
            except* Broken as broken:
                for error in broken.exceptions:
                    customers.violate("the stack broke", str(error))
        self.near_ties = oracle.near_ties
        self.seconds = time.monotonic() - begun

    async def _undisturbed(self, oracle: Oracle) -> tuple[list[Item], list[Item]]:
        """The catalogue with all its answers; a real model is asked on a stack of its own."""
        if self.subject.strict:

            async def computed(item: Item) -> tuple[int, ...]:
                return oracle.ids(item)

            return await catalogue(self.seed, self.subject, computed)
        self.say("undisturbed run")
        with Stack(self.stack.settings) as calm:
            await calm.start(deadline_s=self.subject.patience_s)
            async with connected(calm.places) as client:

                async def asked(item: Item) -> tuple[int, ...]:
                    return await oracle.ask(client, item)

                return await catalogue(self.seed, self.subject, asked)

    async def _strikes(
        self, assault: Assault, customers: Customers, inspection: Inspection, node: Node, begun: float
    ) -> None:
        customers.open()
        await trio.sleep(WARM_UP_S)  # some traffic before the first look, which is the measure for all others
        await self._checkpoint(customers, inspection, assault, node)
        strikes = schedule(self.seed, self.kills, self.weathers)
        for strike, following in zip(strikes, [*strikes[1:], None], strict=True):
            check = strike.number % CHECK_EVERY == 0 or following is None
            await assault.carry_out(strike, then_wait=check or _wait_between(following))
            over = bool(self.minutes) and time.monotonic() - begun > 60 * self.minutes
            if check or over or self.violations:
                await assault.wait_serving()
                await self._checkpoint(customers, inspection, assault, node)
            if over or self.violations:
                return

    async def _checkpoint(self, customers: Customers, inspection: Inspection, assault: Assault, node: Node) -> None:
        """All customers finish; then the books must balance, results must stay, and nothing may have grown."""
        with assault.sheltered():
            await self._examined(customers, inspection, assault, node)
        if not self.violations:
            customers.open()

    async def _examined(self, customers: Customers, inspection: Inspection, assault: Assault, node: Node) -> None:
        await customers.close()
        self.checkpoints += 1
        if trouble := await wait_balanced(node):
            customers.violate("not conserved", trouble)
        if assault.disk_works and (trouble := await wait_saved(node)):
            customers.violate("not saved", trouble)
        await self._doctor(customers)
        if self.checkpoints % CLEAR_EVERY == 0:
            await self._clear(customers, assault, node)
        await customers.replay()
        if trouble := await ledger_gaps(self.stack.places.ledger, customers.accepted):
            customers.violate("ledger", trouble)
        for line in await inspection.wait_small():
            customers.violate("leak", line)
        crashed, self._read = crashes(self.stack.log_path, self._read)
        for line in crashed:
            customers.violate("crashed", line)
        facts = customers.totals
        self.say(
            f"checkpoint: {facts.accepted} requests right, {facts.retries} retries, {len(self.violations)} violations"
        )

    async def _clear(self, customers: Customers, assault: Assault, node: Node) -> None:
        """Clears everything and kills all services behind the reply: what was cached must not come back.

        A disk that takes nothing may refuse, and then promises nothing.
        """
        item = customers.mix.items[self.checkpoints % len(customers.mix.items)]
        await customers.alone(item)
        try:
            peer = await node.dial("scheduler").wait_up()
            await peer.ask(ClearCache(what="all"), Cleared, deadline_s=CLEAR_S)
        except RequestFailed as refused:
            self.say(f"not cleared: {refused}")
            return
        except (PeerGone, PeerSlow, DeadlinePassed) as error:
            customers.violate("not cleared", repr(error))
            return
        await assault.kill_services()
        await assault.wait_serving()
        cached = await customers.alone(item)
        self.say(f"cleared, all services killed: {cached} tokens cached")
        if cached:
            customers.violate("cleared, and there again", f"{cached} of {len(item.ids)} tokens")

    async def _doctor(self, customers: Customers) -> None:
        """`perdure doctor`, every payload read; of a running stack, too."""
        config = load_config(environ=self.stack.environ)
        told = await ask(self.stack.places) if self.stack.process is not None else Told()
        examined = partial(examine, self.stack.places, config, told=told)
        report = await trio.to_thread.run_sync(examined)
        for finding in report.at_least(Level.FAULT):
            customers.violate("doctor", f"{finding.name}: {finding.what}")


def _wait_between(following: Strike | None) -> bool:
    """Whether the next blow falls on a stack that serves."""
    return following is None or following.moment != "recovering"
