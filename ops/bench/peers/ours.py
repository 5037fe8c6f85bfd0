"""Our own engine in the comparison: a whole stack with its defaults, asked through the real client over ZeroMQ."""

from collections.abc import Sequence
from contextlib import ExitStack

import trio

from ops.bench.measure import all_saved, greedy, pool_touched, timelines
from ops.bench.peers.interface import Place, Timeline
from ops.client import connected
from ops.stack import Stack


class Ours:
    """Implements `Engine`. Starts the stack and waits until it has nothing left to prepare."""

    def __init__(self, place: Place, settings: dict[str, str]) -> None:
        named = {"PERDURE_MODEL__SOURCE": str(place.gguf), "PERDURE_MODEL__THREADS": str(place.threads)}
        self.stack = Stack(named | settings)
        with ExitStack() as undo:
            undo.callback(self.stack.remove)
            trio.run(self._start)
            undo.pop_all()

    async def _start(self) -> None:
        await self.stack.start()
        await pool_touched(self.stack)
        worker = (await self.stack.snapshots())["worker"]
        assert worker is not None
        self.facts = {name: worker.data[name] for name in ("backend", "numerics", "kv_dtype")}

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Timeline]:
        """See `Engine.generate`."""
        return trio.run(self._generate, prompts, tokens)

    async def _generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Timeline]:
        async with connected(self.stack.places) as client:
            await client.tokenizer.wait_up()
            await client.detokenizer.wait_up()
            return await timelines(client, prompts, tokens)

    def answer(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """See `Engine.answer`."""
        return trio.run(self._answer, prompt, tokens)

    async def _answer(self, prompt: Sequence[int], tokens: int) -> list[int]:
        async with (
            connected(self.stack.places) as client,
            client.generate(ids=prompt, sampling=greedy(tokens)) as stream,
        ):
            return list((await stream.result()).ids)

    def pause(self) -> None:
        """Waits until nothing is being saved, then a stack sleeps; a stopped one its supervisors would find hanging."""
        trio.run(all_saved, self.stack)

    def resume(self) -> None:
        """Nothing: it has never been stopped."""

    def stop(self) -> None:
        """Ends it, and removes its home."""
        self.stack.remove()
