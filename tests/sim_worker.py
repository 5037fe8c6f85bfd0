"""A worker made of integers: a toy model whose KV lies in a simulated pool, and the oracle that needs none.

The "KV" of a token is mixed from the token, its position and the KV of the position before it, *read from the pool*;
the next token is drawn from the KV of all positions. Blocks that nobody owns hold garbage, so any stale, torn or
foreign block changes tokens.
"""

from array import array

from xxhash import xxh3_64_intdigest

from shared.messages.base import unpack_u32
from shared.messages.engine import KVFacts, Plan, Result, Row, RowResult
from shared.messages.front import TokenLogprob
from tests.plan_rows import after, fed

MASK = (1 << 64) - 1
VOCAB = 24


def mix(*values: int) -> int:
    """A 64-bit hash of integers, the same in every process."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ (value & MASK)) * 0xFF51AFD7ED558CCD) & MASK
        state ^= state >> 29
    return state


def kv_of(token: int, position: int, before: int) -> int:
    return mix(token, position, before)


def draw(kv: list[int], seed: int) -> int:
    return xxh3_64_intdigest(array("Q", kv).tobytes(), seed) % VOCAB


def oracle(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    """Cache-off: what the model says, computed alone and in order."""
    tokens, kv = list(prompt), list[int]()
    while True:
        for position in range(len(kv), len(tokens)):
            kv.append(kv_of(tokens[position], position, kv[-1] if kv else 0))
        if len(tokens) - len(prompt) == count:
            return tokens[len(prompt) :]
        tokens.append(draw(kv, seed))


def checksum_of(values: list[int]) -> int:
    return xxh3_64_intdigest(array("Q", values).tobytes())


class SimWorker:
    """A pool of garbage, and whatever was written into it since."""

    def __init__(self, facts: KVFacts, max_context: int) -> None:
        self.facts = facts
        self.max_context = max_context
        self.garbage = 0
        self.pool = [self.poison() for _ in range(facts.blocks)]
        self.computed = 0
        self.token_s = 0.0
        """Seconds that it says a token took."""
        self.told: dict[int, int] = {}
        """By key, up to where its blocks were ever told: further than needed when a plan was cut short."""
        self.drawn: dict[int, int] = {}
        self.ended: set[int] = set()
        """By key, what was drawn last, and who ended by it."""
        self.clean: set[int] = set()
        """Free blocks that hold garbage already."""

    def poison(self) -> list[int]:
        self.garbage += 1
        return [mix(1 << 60, self.garbage, i) for i in range(self.facts.block_tokens)]

    def hears(self, plan: Plan) -> None:
        """Of a plan when it is made, with whole rows."""
        for row in plan.rows:
            end = row.start + fed(row) + plan.steps - 1
            self.told[row.key] = max(end, self.told.get(row.key, 0))

    def run(self, plan: Plan, curtailed: int = 0) -> Result:
        """A plan with whole rows; `curtailed`: so many of its steps are not made."""
        rows, before_it = list[RowResult](), self.computed
        for step in range(plan.steps - curtailed):
            rows += self._step([after(row, step) for row in plan.rows], plan.steps - 1 - step)
        seconds = self.token_s * (self.computed - before_it)
        return Result(epoch=plan.epoch, seq=plan.seq, rows=tuple(rows), forward_s=seconds)

    def _step(self, plan_rows: list[Row], ahead: int) -> list[RowResult]:
        """One step, behind which the plan has `ahead` more, for which there are blocks already."""
        size, rows = self.facts.block_tokens, list[RowResult]()
        for row in plan_rows:
            if row.key in self.ended:
                rows.append(RowResult(row.key, dropped=True))
                continue
            ids, table = unpack_u32(row.ids), unpack_u32(row.blocks)
            if row.feeds_last:
                assert not ids
                ids.append(self.drawn[row.key])
            end = row.start + len(ids)
            assert -(-(end + ahead) // size) <= len(table) <= -(-self.told[row.key] // size)
            for position, token in enumerate(ids, row.start):
                before = self.pool[table[(position - 1) // size]][(position - 1) % size] if position else 0
                self.pool[table[position // size]][position % size] = kv_of(token, position, before)
            self.computed += len(ids)
            token = -1
            if row.sample is not None:
                kv = [self.pool[table[position // size]][position % size] for position in range(end)]
                token = self.drawn[row.key] = draw(kv, row.sample.seed)
            if token in row.stop_ids:
                self.ended.add(row.key)
            logprob = TokenLogprob(-float(end), b"", ()) if row.sample and row.sample.logprobs >= 0 else None
            rows.append(RowResult(row.key, token, logprob))
        return rows
