"""The cells of the exactness matrix contain every pair of circumstances, in an order that a stack can bring about."""

from itertools import product

import pytest

from ops.exact.plan import CHUNKS, LOADS, TIERS, by_machine, covering, every, pairs


@pytest.mark.parametrize(("threads", "isas"), [((1, 2), ("avx2",)), ((1, 2), ("avx2", "avx512")), ((1,), ("neon",))])
def test_a_covering_contains_every_pair_in_few_cells(threads: tuple[int, ...], isas: tuple[str, ...]) -> None:
    cells = covering(threads, isas)
    facts = (CHUNKS, threads, isas, TIERS, LOADS)
    wanted = {
        ((a, x), (b, y))
        for a in range(len(facts))
        for b in range(a + 1, len(facts))
        for x, y in product(facts[a], facts[b])
    }
    assert set().union(*map(pairs, cells)) == wanted
    assert len(cells) == len(set(cells)) <= len(every(threads, isas)) // 2
    assert len(cells) >= len(TIERS) * 3


def test_a_machine_comes_once_and_its_cold_cells_first() -> None:
    groups = by_machine(every((1, 2), ("a",)))
    assert len({machine for machine, _ in groups}) == len(groups) == 6
    for _, cells in groups:
        assert [cell.tier for cell in cells] == [tier for tier in TIERS for _ in LOADS]
