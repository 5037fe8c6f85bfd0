"""The whole matrix: stacks one after another, cell by cell, every answer against the first of its prompt."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels.cpu.library import supported
from ops.exact.plan import Cell, Machine, by_machine, covering, every
from ops.exact.stage import Answer, Stage, settings
from ops.prompts import passage
from ops.stack import Stack
from shared.model.spec import open_model

SHORTEST = 50


def prompts_of(source: str, count: int, longest: int) -> list[list[int]]:
    """So many prompts of the project's own text, lengths spread evenly over magnitudes; the same ones every time."""
    tokenizer = open_model(source, Path()).tokenizer()
    rng = random.Random("exact")
    found = []
    for number in range(count):
        length = round(SHORTEST * (longest / SHORTEST) ** rng.random())
        ids = tokenizer.encode(passage(7000 + number, 8 * length), add_special_tokens=False).ids
        found.append(list(ids[:length]))
    return found


@dataclass
class Outcome:
    """`differing`: what differs, in words; `compared`: answers that were compared with an earlier one."""

    compared: int = 0
    cells: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether nothing differs, of something that was compared."""
        return self.compared > 0 and not self.differing

    def facts(self) -> dict[str, Any]:
        """For the JSON file."""
        return vars(self)

    def __str__(self) -> str:
        what = f"{self.compared} answers compared in {self.cells} cells, {len(self.differing)} differ"
        return what + "".join(f"\n  {line}" for line in self.differing[:20])


class Matrix:
    """`say` is told of each cell."""

    def __init__(
        self,
        source: str,
        prompts: Sequence[Sequence[int]],
        threads: Sequence[int],
        isas: Sequence[str],
        say: Callable[[str], None],
        activations: str = "fp32",
    ) -> None:
        self._source, self._prompts, self._say, self._activations = source, prompts, say, activations
        self._threads, self._isas = threads, isas or supported() or ("",)
        self._first: list[tuple[Answer, Cell] | None] = [None] * len(prompts)
        self._found = Outcome()

    async def run(self, cross: int) -> Outcome:
        """All prompts in cells that cover every pair, then the first `cross` ones in every cell."""
        await self.answer(covering(self._threads, self._isas), len(self._prompts))
        if cross:
            await self.answer(every(self._threads, self._isas), min(cross, len(self._prompts)))
        return self._found

    async def answer(self, cells: Sequence[Cell], count: int) -> Outcome:
        """The first `count` prompts in these cells; all that was found so far."""
        prompts = self._prompts[:count]
        for machine, mine in by_machine(cells):
            with Stack(self._settings(machine, prompts)) as stack:
                await stack.start()
                stage = Stage(stack, prompts)
                for cell in mine:
                    answers = await stage.answers(cell)
                    differing = self._judge(cell, answers)
                    self._say(f"{cell}: {len(answers)} answers, {differing} differ")
        return self._found

    def _settings(self, machine: Machine, prompts: Sequence[Sequence[int]]) -> dict[str, str]:
        spec = open_model(self._source, Path()).spec
        plain = settings(machine, self._source, prompts, spec.kv_layout("fp32").token_bytes)
        return plain | {"PERDURE_MODEL__ACTIVATIONS": self._activations}

    def _judge(self, cell: Cell, answers: Sequence[Answer]) -> int:
        self._found.cells += 1
        before = len(self._found.differing)
        for number, answer in enumerate(answers):
            for tier, tokens in answer.cached.items():
                self._found.cached[tier] = self._found.cached.get(tier, 0) + tokens
            known = self._first[number]
            if known is None:
                self._first[number] = (answer, cell)
                continue
            self._found.compared += 1
            first, where = known
            what = _difference(first, answer)
            if what:
                length = len(self._prompts[number])
                self._found.differing.append(f"prompt {number} of {length} tokens, {cell} against {where}: {what}")
        return len(self._found.differing) - before


def _difference(one: Answer, other: Answer) -> str:
    for at, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)):
        if a != b:
            return f"id {at} is {b}, not {a}"
    if len(one.ids) != len(other.ids):
        return f"{len(other.ids)} ids, not {len(one.ids)}"
    for at, (x, y) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        if x != y:
            return f"log-probabilities of token {at} are {y}, not {x}"
    return ""
