"""The packed table and the recency lists against a dict and plain lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.store.catalog.entries import Entries
from services.store.catalog.identity_table import NONE, DictMap, PackedMap
from services.store.catalog.order import RESERVED, Orders

crowded = st.integers(0, 40).map(lambda n: (n % 5).to_bytes(8, "little") + n.to_bytes(24, "little"))
"""Identities of which many share their home slot."""


@given(st.lists(st.tuples(st.sampled_from(["put", "remove", "many"]), crowded), max_size=120))
def test_a_crowded_table_equals_a_dict_whatever_is_put_and_removed(changes: list[tuple[str, bytes]]) -> None:
    rows = np.zeros((4096, 32), np.uint8)
    packed, plain = PackedMap(lambda: rows), DictMap(lambda: rows)
    entry = 0
    for verb, identity in changes:
        names = [identity] if verb == "put" else [bytes([i]) + identity[1:] for i in range(3)] if verb == "many" else []
        names = [name for name in names if plain.get(name) == NONE]
        if verb == "remove" and plain.get(identity) != NONE:
            packed.remove(identity)
            plain.remove(identity)
        if names:
            numbers = np.arange(entry, entry + len(names), dtype=np.uint32)
            entry += len(names)
            rows[numbers] = [np.frombuffer(name, np.uint8) for name in names]
            packed.put_many(rows[numbers], numbers)
            plain.put_many(rows[numbers], numbers)
        asked = np.concatenate((rows[:entry], rows[-1:]))
        assert packed.get_many(asked).tolist() == plain.get_many(asked).tolist()
        assert len(packed) == len(plain)
        assert packed.get(identity) == plain.get(identity)


def test_the_table_grows_and_finds_everything_again() -> None:
    dice = np.random.default_rng(1)
    rows = dice.integers(0, 256, (20_000, 32), np.uint8)
    packed = PackedMap(lambda: rows)
    packed.put_many(rows[:10_000], np.arange(10_000, dtype=np.uint32))
    for entry in range(10_000, 12_000):
        packed.put(rows[entry].tobytes(), entry)
    found = packed.get_many(rows)
    assert found[:12_000].tolist() == list(range(12_000))
    assert (found[12_000:] == NONE).all()
    for entry in range(0, 12_000, 2):
        packed.remove(rows[entry].tobytes())
    assert packed.get_many(rows[:12_000]).tolist() == [NONE if entry % 2 == 0 else entry for entry in range(12_000)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "behind", "remove"]), st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)
        ),
        max_size=60,
    )
)
def test_recency_lists_equal_plain_lists(changes: list[tuple[str, int, int, int]]) -> None:
    orders, plain = Orders(RESERVED + 10), [list[int]() for _ in range(3)]
    for verb, head, number, anchor in changes:
        entry, anchor = RESERVED + number, RESERVED + anchor
        where = next((i for i, members in enumerate(plain) if entry in members), None)
        if verb == "remove" and where is not None:
            orders.remove(where, entry)
            plain[where].remove(entry)
        elif verb == "push" and where is None:
            orders.push(head, entry)
            plain[head].insert(0, entry)
        elif verb == "behind" and where is None and anchor in plain[head]:
            orders.insert_behind(head, anchor, entry)
            plain[head].insert(plain[head].index(anchor) + 1, entry)
        for i, members in enumerate(plain):
            assert list(orders.from_oldest(i)) == members[::-1]
            assert orders.length(i) == len(members)
        assert (entry in orders) == any(entry in members for members in plain)
    orders.check_integrity()
    again = Orders(RESERVED + 10)
    again.rebuild({i: np.array(members, np.uint32) for i, members in enumerate(plain)})
    again.check_integrity()
    assert [list(again.from_oldest(i)) for i in range(3)] == [members[::-1] for members in plain]


def test_p25_a_block_costs_less_than_128_bytes_of_packed_arrays() -> None:
    entries = Entries()
    entries.reserve_rows(1 << 20)
    rows = entries.capacity
    per_row = (
        entries.identities.nbytes
        + sum(column.nbytes for column in entries.columns.values())
        + 2 * 8 * rows  # the links of two recency orders
        + 4 * rows * 3  # the table, at worst a third full
    ) / rows
    assert per_row <= 128
