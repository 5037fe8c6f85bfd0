"""The models that chaos runs on: settings of their stack, prompts, and what an undisturbed run answers.

The toy model is strict and costs nothing: its answers are computed without any cache, batch or process. Real models
are asked beforehand on a stack that nobody disturbs, and compared by `ops/equality.py`.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ops.chaos.mix import Item
from ops.client import Client, Result
from ops.equality import Comparison, compare
from ops.prompts import passage
from shared.messages.front import Finish, Sampling, Timing, Usage
from shared.model.toy import toy_generate

SEED = 7
Draw = Callable[[int, int], list[int]]
"""(seed, tokens) -> ids of a text that no other seed has."""

BRITTLE = {
    "journal_before_accept": 17,
    "journal_after_accept": 29,
    "scheduler_after_step": 230,
    "worker_in_save": 61,
    "worker_in_load": 130,
    "store_after_granted": 31,
    "store_after_commit_arrives": 23,
    "store_before_data": 19,
    "store_after_data": 17,
    "store_commit_index": 13,
    "store_after_index": 11,
    "tokenizer_before_submit": 27,
    "tokenizer_after_journaled": 21,
}
"""Steps that each life passes so many times less one, and dies: late enough that every request gets on meanwhile (a
long prompt loads 60 blocks, and three lives of a worker without progress end it). None of the detokenizer: a new life
passes its step once for each retained request, and would never get through.
"""

FULL = {
    "journal_before_accept": "fail:7",
    "scheduler_before_step": "fail:50",
    "store_before_data": "fail:5",
    "store_commit_index": "fail:3",
}
"""Where no file system of its own can be had for the home: each writer of the home meets an error once a life."""

COMMON = {
    "PERDURE_SCHEDULER__RESULT_TTL_S": "7200",
    "PERDURE_SCHEDULER__GRACE_S": "30",
    "PERDURE_SUPERVISE__MAX_FAILURES": "6",
}


@dataclass(frozen=True)
class Subject:
    """A model under attack. `hang_s`: how long a silent service is left alone. `patience_s`: for one answer."""

    name: str
    settings: dict[str, str]
    draw: Draw
    families: int
    """Groups of prompts that share a prefix; each has a base, branches, and a conversation of turns."""
    prefix: int
    tokens: int
    long: int
    hang_s: float
    patience_s: float
    customers: int
    step_delay_s: float
    tmpfs_bytes: int
    """Of the tmpfs that the arena has to fit into, where one can be mounted: less than the host tier asks for."""
    strict: bool = False

    def hooks(self, weather: str) -> dict[str, str]:
        """Settings of a weather, in environment form. Steps are slowed, so that answers have a middle."""
        hooks: dict[str, str] = {}
        if self.step_delay_s:
            hooks["worker_in_step"] = f"delay:{self.step_delay_s}"
        found = {}
        match weather:
            case "slow_disk":
                hooks |= {"store_before_data": "delay:0.03", "store_after_data": "delay:0.03"}
            case "slow_load":
                hooks |= {"store_in_load": "delay:0.1", "worker_in_load": "delay:0.02"}
            case "failing_disk":
                hooks |= {"store_before_data": "fail:9", "store_after_index": "fail:4", "store_in_load": "fail:3"}
            case "full_disk":
                hooks |= FULL
            case "broken_disk":
                hooks |= {"store_before_data": "fail", "store_in_load": "fail"}
            case "brittle":
                hooks |= {name: f"exit:{count}" for name, count in BRITTLE.items()}
            case "retraction":
                found["PERDURE_FAULTS__RETRACT_EVERY"] = "7"
            case "small_steps":
                found["PERDURE_SCHEDULER__STEP_TOKENS"] = "48"
        return found | {f"PERDURE_FAULTS__HOOKS__{name.upper()}": action for name, action in hooks.items()}


def _numbers(seed: int, tokens: int) -> list[int]:
    rng = random.Random(f"prompt-{seed}")
    return [rng.randrange(256) for _ in range(tokens)]


def _tiers(pool_mib: int, host: str, disk: str, blocks: tuple[int, int, int]) -> dict[str, str]:
    """Of models so small that computing is quicker than loading: they load all the same."""
    pool, in_host, on_disk = blocks
    return COMMON | {
        "PERDURE_SCHEDULER__RESTORE": "load",
        "PERDURE_KV__POOL_BYTES": f"{pool_mib} MiB",
        "PERDURE_STORE__HOST_BYTES": host,
        "PERDURE_STORE__DISK_BYTES": disk,
        "PERDURE_FAULTS__MAX_POOL_BLOCKS": str(pool),
        "PERDURE_FAULTS__MAX_HOST_BLOCKS": str(in_host),
        "PERDURE_FAULTS__MAX_DISK_BLOCKS": str(on_disk),
    }


def toy() -> Subject:
    """Integers: every token depends on every byte of KV before it."""
    settings = {"PERDURE_MODEL__SOURCE": f"toy:{SEED}"} | _tiers(1, "4 MiB", "16 MiB", (160, 220, 700))
    return Subject(
        "toy", settings, _numbers, families=24, prefix=96, tokens=60, long=700, hang_s=4.0, patience_s=300.0,
        customers=6, step_delay_s=0.004, tmpfs_bytes=2 << 20, strict=True,
    )  # fmt: skip


def tiny(folder: Path) -> Subject:
    """A random Llama of two layers, written into `folder`: real arithmetic, real batches."""
    from ops.chaos.tiny import write_tiny

    settings = {
        "PERDURE_MODEL__SOURCE": str(write_tiny(folder / "tiny")),
        "PERDURE_MODEL__THREADS": "1",
        "PERDURE_KV__BLOCK_TOKENS": "16",
    } | _tiers(16, "16 MiB", "64 MiB", (160, 220, 700))
    return Subject(
        "tiny", settings, _numbers, families=8, prefix=96, tokens=40, long=400, hang_s=6.0, patience_s=300.0,
        customers=5, step_delay_s=0.003, tmpfs_bytes=8 << 20,
    )  # fmt: skip


def smollm2(source: str) -> Subject:
    """SmolLM2-135M-Instruct; `source` is its file."""
    from shared.model.spec import open_model

    tokenizer = open_model(source, Path()).tokenizer()

    def draw(seed: int, tokens: int) -> list[int]:
        return list(tokenizer.encode(passage(seed, 8 * tokens), add_special_tokens=False).ids[:tokens])

    settings = {"PERDURE_MODEL__SOURCE": source} | _tiers(256, "256 MiB", "512 MiB", (96, 128, 256))
    return Subject(
        "smollm2", settings, draw, families=4, prefix=160, tokens=24, long=600, hang_s=10.0, patience_s=600.0,
        customers=4, step_delay_s=0.0, tmpfs_bytes=128 << 20,
    )  # fmt: skip


class Oracle:
    """What each item's answer is, and whether another one is equal to it."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._answers: dict[Item, Result] = {}
        self.near_ties = 0

    def ids(self, item: Item) -> tuple[int, ...]:
        """The undisturbed answer."""
        return self.answer(item).ids

    def answer(self, item: Item) -> Result:
        """The undisturbed answer with its logprobs; KeyError when a real model has not been asked for it."""
        if item not in self._answers and self.subject.strict:
            usage = Usage(len(item.ids), item.tokens, 0, {})
            finish = Finish(reason="length", usage=usage, timing=Timing(0.0, 0.0, 0.0))
            ids = tuple(toy_generate(SEED, item.ids, item.tokens))
            self._answers[item] = Result("oracle", ids, "", None, finish)
        return self._answers[item]

    async def ask(self, client: Client, item: Item) -> tuple[int, ...]:
        """Asks an undisturbed stack, once an item; the toy model needs none."""
        if not self.subject.strict and item not in self._answers:
            sampling = Sampling(max_tokens=item.tokens, temperature=0.0, ignore_eos=True, logprobs=2)
            async with client.generate(ids=item.ids, sampling=sampling) as stream:
                self._answers[item] = await stream.result()
        return self.ids(item)

    def verdict(self, item: Item, got: Sequence[int], *, whole: bool) -> Comparison:
        """Compares by the rule; without `whole`, `got` may stop anywhere."""
        wanted = self.answer(item)
        if not whole:
            wanted = replace(wanted, ids=wanted.ids[: len(got)])
        found = compare(wanted, replace(wanted, ids=tuple(got)))
        self.near_ties += found.equal and found.first_difference is not None
        return found


Answer = Callable[[Item], Awaitable[tuple[int, ...]]]


async def catalogue(seed: int, subject: Subject, answer: Answer) -> tuple[list[Item], list[Item]]:
    """(items, long items): families of prompts, the turns of a conversation containing the answers before them."""
    rng = random.Random(f"catalogue-{seed}")
    items: list[Item] = []
    for family in range(subject.families):
        base = subject.draw(seed * 1000 + family, subject.prefix + rng.randrange(subject.prefix))
        for branch in range(2):
            cut = rng.randrange(len(base) // 2, len(base))
            own = subject.draw(seed * 1000 + 500 + 10 * family + branch, rng.randrange(1, 40))
            items.append(Item(tuple(base[:cut] + own), rng.randrange(subject.tokens // 2, subject.tokens)))
        said = list(base)
        for turn in range(3):
            item = Item(tuple(said), rng.randrange(subject.tokens // 2, subject.tokens))
            items.append(item)
            said += [*(await answer(item)), *subject.draw(seed * 1000 + 900 + 10 * family + turn, 20)]
    long_items = [
        Item(tuple(subject.draw(seed * 1000 + 990 + n, subject.long + 37 * n)), subject.tokens // 2) for n in range(3)
    ]
    for item in items + long_items:
        await answer(item)
    rng.shuffle(items)
    return items, long_items
