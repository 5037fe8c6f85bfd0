"""The story, chapter by chapter. Each chapter returns rows for the table and raises Broken when a promise fails."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from ops.client import Client, Result, connected
from ops.equality import compare
from ops.prompts import passage
from ops.stack import Stack
from ops.stream import joined
from shared.messages.front import Sampling

LONG_CHARACTERS = 7000
"""About 2,000 tokens."""
ANSWER_TOKENS = 32
TOLD_TOKENS = 64
KILL_AFTER = 12
"""Tokens of an answer that are out before somebody is killed."""
KILLED = ("worker", "scheduler", "store", "detokenizer")


class Broken(AssertionError):
    """A promise did not hold; the text says which, with the numbers."""


@dataclass
class Row:
    """One line of the final table."""

    what: str
    killed: str
    result: Result
    verdict: str


@dataclass
class Story:
    """The demo on one stack. `say` tells the user what happens now."""

    stack: Stack
    say: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)

    async def run(self) -> None:
        """All chapters, in order."""
        self.say("starting five services")
        await self.stack.start()
        first = await self._first_and_second()
        for service in KILLED:
            await self._killed(service)
        await self._stopped_and_started(first)

    # --- chapters -----------------------------------------------------------------------------------------------

    async def _first_and_second(self) -> Result:
        prompt = passage(1, LONG_CHARACTERS)
        await self._ask("Name three colours.", 8, "a short question", warm_up=True)
        cold = await self._ask(prompt, ANSWER_TOKENS, "a long prompt, cold")
        warm = await self._ask(prompt, ANSWER_TOKENS, "the same prompt again")
        block = await self._block_tokens()
        usage = warm.finish.usage
        if usage.cached_tokens < usage.prompt_tokens - block:
            raise Broken(f"{usage.cached_tokens} of {usage.prompt_tokens} tokens were cached, a block has {block}")
        self._equal("the cached answer", cold, warm)
        return cold

    async def _killed(self, service: str) -> None:
        prompt = passage(100 + KILLED.index(service), LONG_CHARACTERS // 4)
        undisturbed = await self._ask(prompt, TOLD_TOKENS, f"before the {service} is killed")

        async def kill() -> None:
            self.say(f"kill -9 of the {service}, in the middle of an answer")
            self.stack.kill(service)

        disturbed = await self._ask(prompt, TOLD_TOKENS, f"the {service} is killed", killed=service, then=kill)
        self._equal(f"the answer over the {service}'s death", undisturbed, disturbed)
        await self.stack.wait_serving()

    async def _stopped_and_started(self, cold: Result) -> None:
        for remove_arena in (False, True):
            self.say("stopping everything" + (" and removing the arena, as a reboot would" if remove_arena else ""))
            await self.stack.stop()
            if remove_arena:
                self.stack.remove_arena()
            self.say("starting everything again")
            await self.stack.start()
            tier = "disk" if remove_arena else "host"
            again = await self._ask(passage(1, LONG_CHARACTERS), ANSWER_TOKENS, f"after stop and start ({tier} tier)")
            if again.finish.timing.ttft_s > cold.finish.timing.ttft_s / 3:
                raise Broken(
                    f"time to first token after a restart is {again.finish.timing.ttft_s:.3f} s, "
                    f"more than a third of the cold {cold.finish.timing.ttft_s:.3f} s"
                )
            if not again.finish.usage.cached_by_tier[tier]:
                raise Broken(f"nothing came from the {tier} tier: {again.finish.usage.cached_by_tier}")
            self._equal("the answer after stop and start", cold, again)

    # --- helpers ------------------------------------------------------------------------------------------------

    async def _ask(
        self,
        prompt: str,
        tokens: int,
        what: str,
        *,
        killed: str = "",
        then: Callable[[], Awaitable[None]] | None = None,
        warm_up: bool = False,
    ) -> Result:
        """Answers `prompt` greedily; after KILL_AFTER tokens `then` happens, once."""
        self.say(what)
        sampling = Sampling(max_tokens=tokens, temperature=0.0, logprobs=2, ignore_eos=True)
        async with connected(self.stack.places, notice=self._notice, recovery_timeout_s=120) as client:
            result = await _read(client, prompt, sampling, then)
        if not warm_up:
            self.rows.append(Row(what, killed, result, ""))
        return result

    def _notice(self, away: tuple[str, ...]) -> None:
        self.say(f"waiting for {', '.join(away)}" if away else "everybody is back")

    def _equal(self, what: str, wanted: Result, got: Result) -> None:
        comparison = compare(wanted, got)
        self.rows[-1].verdict = str(comparison)
        if not comparison.equal:
            raise Broken(f"{what} differs: {comparison}")

    async def _block_tokens(self) -> int:
        scheduler = (await self.stack.snapshots())["scheduler"]
        if scheduler is None:
            raise Broken("the scheduler does not answer")
        return int(scheduler.data["block_tokens"])


async def _read(client: Client, prompt: str, sampling: Sampling, then: Callable[[], Awaitable[None]] | None) -> Result:
    async with client.generate(prompt=prompt, sampling=sampling) as stream:
        collected = []
        async for chunk in stream:
            collected.append(chunk)
            if then is not None and chunk.end >= KILL_AFTER and chunk.finish is None:
                await then()
                then = None
        if then is not None:
            raise Broken("the answer was over before anybody could be killed")
        return joined(stream.id, collected)


async def tell(story: Story, limit_s: float) -> float:
    """Runs the story within `limit_s`; its seconds."""
    begun = time.monotonic()
    with trio.fail_after(limit_s):
        await story.run()
    return time.monotonic() - begun
