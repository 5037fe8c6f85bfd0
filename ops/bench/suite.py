"""The suite: ours through the client and all services, `transformers` in its process, interleaved."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from ops.bench.encoding import encoding
from ops.bench.figures import Figures
from ops.bench.measure import Spread, pool_touched, timed, together
from ops.bench.overhead import overhead
from ops.bench.peer import ROOT, TransformersPeer
from ops.bench.prompts import Prompts
from ops.bench.revival import revival
from ops.bench.startup import startup
from ops.bench.streams import streams
from ops.bench.warm import warm
from ops.client import Client, connected
from ops.stack import Stack
from services.worker.recorder import recorded

STREAMS = 8


@dataclass
class Suite:
    """What one run measures through the services, on `stack`; the figures go into `book`."""

    stack: Stack
    source: str
    threads: int
    rounds: int
    book: Figures

    def __post_init__(self) -> None:
        self.fresh = Prompts(self.source).fresh

    def note(self, name: str, ours: Spread, theirs: Spread | None, ratio: float, bar: str) -> None:
        """See `Figures.note`."""
        self.book.note(name, ours, theirs, ratio, bar)

    async def run(self, only: set[str]) -> None:
        """All sections, or those named."""
        sections: dict[str, Callable[[], Any]] = {
            "prefill": self.against_transformers,
            "streams": self.streams,
            "warm": self.warm,
            "start": self.start,
            "encoding": self.encoding,
            "services": self.services,
            "revival": self.revived,
            "overhead": self.durability,
        }
        for name, section in sections.items():
            if not only or name in only:
                await section()

    async def against_transformers(self) -> None:
        """Prefill of 512 to 7,500 tokens and batch-1 decode, ours and theirs in turn."""
        peer = await trio.to_thread.run_sync(TransformersPeer, self.source, self.threads)
        with peer:
            async with connected(self.stack.places) as client:
                await timed(client, self.fresh(64), 8)
                await trio.to_thread.run_sync(peer.run, self.fresh(64), 8)
                for length, tokens in ((512, 1), (2048, 1), (6000, 33), (7500, 1), (128, 65)):
                    await self._pair(client, peer, length, tokens)

    async def _pair(self, client: Client, peer: TransformersPeer, length: int, tokens: int) -> None:
        ours, theirs, ours_itl, theirs_itl = [], [], [], []
        for _ in range(self.rounds):
            mine = await timed(client, self.fresh(length), tokens)
            other = await trio.to_thread.run_sync(peer.run, self.fresh(length), tokens)
            ours.append(mine.ttft_s)
            theirs.append(other["ttft_s"])
            ours_itl.append(mine.itl_s)
            theirs_itl.append(other["decode_s"] / max(tokens - 1, 1))
        if length >= 512:
            a, b = Spread.of(ours), Spread.of(theirs)
            self.note(f"cold TTFT of {length} tokens, s", a, b, a.median / b.median, "<= 1")
        if tokens > 1:
            a, b = Spread.of(ours_itl), Spread.of(theirs_itl)
            self.note(f"decode, batch 1, after {length} tokens, s a token", a, b, a.median / b.median, "<= 1")

    async def streams(self) -> None:
        """Eight and thirty-two at once, and what the services take meanwhile."""
        await streams(self.stack, self.fresh, self.note, self.rounds)

    async def warm(self) -> None:
        """A cached prefix: from the device, after a kill, from a cold disk."""
        await warm(self.stack, self.fresh, self.note, self.rounds)

    async def start(self) -> None:
        """How soon everything is there."""
        await startup(self.stack.settings, self.fresh, self.note, self.rounds)

    async def encoding(self) -> None:
        """What streams notice of a long prompt's encoding."""
        await encoding(self.stack, self.fresh, self.note, self.rounds)

    async def revived(self) -> None:
        """After `kill -9` of everything: what comes back, and how soon the first hit answers."""
        await revival(self.stack.settings, self.fresh, self.note, self.rounds)

    async def durability(self) -> None:
        """What everything on costs when nothing is hit."""
        await overhead(self.stack.settings, self.fresh, self.note, self.rounds)

    async def services(self) -> None:
        """Eight streams through all services against their recorded plans, replayed in one process."""
        ratios, seconds, replays = [], [], []
        for _ in range(max(1, self.rounds // 2)):
            plans = self.stack.base / f"plans-{time.monotonic_ns()}"
            with Stack(self.stack.settings | {"PERDURE_FAULTS__RECORD_PLANS": str(plans)}) as recording:
                await recording.start()
                await pool_touched(recording)
                async with connected(recording.places) as client:
                    await timed(client, self.fresh(64), 8)
                    skip = sum(1 for _ in recorded(plans))
                    begun = time.perf_counter()
                    await together(client, [self.fresh(128) for _ in range(STREAMS)], 128)
                    seconds.append(time.perf_counter() - begun)
                environ = recording.environ | {"PERDURE_FAULTS__RECORD_PLANS": ""}
            command = [sys.executable, "-m", "ops.bench.replay", str(plans), str(skip)]
            done = await trio.run_process(
                command, env=environ, cwd=ROOT, capture_stdout=True, stderr=subprocess.DEVNULL
            )
            replays.append(float(json.loads(done.stdout)["seconds"]))
            ratios.append(replays[-1] / seconds[-1])
        ratio = Spread.of(ratios).median
        name = "8 streams through all services against replayed plans, s"
        self.note(name, Spread.of(seconds), Spread.of(replays), ratio, ">= 0.85")
