"""One call a step: near float64; equal bits in any company, by any chunks, on any crew and every instruction set."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu import library
from tests.kernels.step_case import KINDS, Engine, Fed, Model, Sequence_, Shape, StepError, op

pytestmark = pytest.mark.skipif(not library.supported(), reason="this CPU has none of the instruction sets")

LIBRARIES = tuple(library.load(isa) for isa in library.supported())

SHAPES = {
    "fused": Shape(),
    "quantised": Shape(weights="Q8_0", kv_heads=1, qk_norm=True),
    "int8": Shape(weights="Q8_0", overwrites=True, wide=64, int8=True),
    "odd": Shape(layers=1, hidden=50, heads=3, kv_heads=3, dim=32, wide=41, vocab=33, rope_dims=8, weights="BF16"),
    "overwriting": Shape(layers=3, hidden=64, heads=6, wide=64, rope_dims=0, overwrites=True),
}
MODELS = {name: Model(shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}


def ids_of(model: Model, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, model.shape.vocab, count).tolist()


def whole(engine: Engine, ids: Sequence[int]) -> tuple[list[bytes], bytes]:
    """Logits of each token, and the KV, of a sequence fed at once."""
    sequence = engine.sequence(len(ids))
    logits, health = engine.step([Fed(sequence, ids, range(len(ids)))])
    assert (health == 0).all()
    return [row.tobytes() for row in logits], engine.kv(sequence)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("count", [1, 5, 70])
def test_logits_are_near_float64(name: str, count: int) -> None:
    model = MODELS[name]
    ids = ids_of(model, count, 5)
    engine = Engine(LIBRARIES[0], model, threads=2, dtype="fp32")
    logits, _ = engine.step([Fed(engine.sequence(count), ids, range(count))])
    off = np.abs(logits - model.truth(ids)).max()
    assert 1e-3 < off < 0.4 if model.shape.int8 else off < 3e-5


@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(["fp16", "bf16"]),
    st.sampled_from([16, 32, 64]),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_chunks_company_threads_and_instruction_sets_change_no_bit(
    name: str, dtype: str, block_tokens: int, threads: int, seed: int
) -> None:
    """Three sequences fed by random chunks, together; each is compared with itself fed alone and at once."""
    model, random = MODELS[name], np.random.default_rng(seed)
    prompts = [ids_of(model, random.integers(1, 81), seed + i) for i in range(3)]
    settings: dict[str, Any] = {"dtype": dtype, "block_tokens": block_tokens}
    alone = Engine(LIBRARIES[0], model, **settings)
    expected = [whole(alone, ids) for ids in prompts]
    for cpu in LIBRARIES:
        engine = Engine(cpu, model, threads=threads, **settings)
        sequences = [engine.sequence(len(ids)) for ids in prompts]
        while any(s.tokens < len(ids) for s, ids in zip(sequences, prompts, strict=True)):
            fed, known = [], []
            for sequence, ids, (logits, _) in zip(sequences, prompts, expected, strict=True):
                chunk = min(len(ids) - sequence.tokens, random.choice([0, 1, 1, 7, 40, 80]))
                if chunk:
                    wanted = np.flatnonzero(random.random(chunk) < random.choice([0.0, 0.1, 1.0])).tolist()
                    fed.append(Fed(sequence, ids[sequence.tokens : sequence.tokens + chunk], wanted))
                    known += [logits[sequence.tokens + i] for i in wanted]
            if fed:
                logits, health = engine.step(fed)
                assert [row.tobytes() for row in logits] == known
                assert (health == 0).all()
        assert [engine.kv(sequence) for sequence in sequences] == [kv for _, kv in expected]


def test_long_sequences_are_split_among_threads_without_a_trace() -> None:
    """Beyond 512 positions attention has several partials."""
    model = MODELS["fused"]
    ids = ids_of(model, 650, 9)
    expected, kv = whole(Engine(LIBRARIES[0], model), ids)
    for threads in (2, 3):
        engine = Engine(LIBRARIES[-1], model, threads=threads)
        sequence = engine.sequence(650)
        engine.step([Fed(sequence, ids[:640])])
        rows = [engine.step([Fed(sequence, [i], [0])])[0].tobytes() for i in ids[640:]]
        assert rows == expected[640:]
        assert engine.kv(sequence) == kv


def test_a_step_where_nobody_samples_writes_kv_and_no_logits() -> None:
    model = MODELS["fused"]
    ids = ids_of(model, 20, 1)
    _, kv = whole(Engine(LIBRARIES[0], model), ids)
    engine = Engine(LIBRARIES[0], model, threads=2)
    sequence = engine.sequence(20)
    logits, health = engine.step([Fed(sequence, ids)])
    assert (logits.shape, health.shape) == ((0, 101), (20,))
    assert engine.kv(sequence) == kv


def test_kv_that_is_not_finite_marks_its_token_and_spoils_nobody_else() -> None:
    model = Model(Shape(layers=1))
    model.layers[0]["qkv_bias"][-1] = 65000.0  # the last V dim overflows fp16 for those whose product is large
    ids = [*range(60)]
    engine = Engine(LIBRARIES[0], model, threads=2)
    sequences = [engine.sequence(1) for _ in ids]
    logits, health = engine.step([Fed(s, [i], [0]) for s, i in zip(sequences, ids, strict=True)])
    assert np.isfinite(health).all()
    model.layers[0]["qkv_bias"][-1] = 65519.0
    sequences = [engine.sequence(1) for _ in ids]
    logits, health = engine.step([Fed(s, [i], [0]) for s, i in zip(sequences, ids, strict=True)])
    well = np.isfinite(health)
    assert 0 < well.sum() < len(ids)
    assert (np.isfinite(logits).all(1) == well).all()


def test_every_kind_of_op_has_its_time() -> None:
    engine = Engine(LIBRARIES[0], MODELS["quantised"], threads=2)
    sequence = engine.sequence(60)
    engine.step([Fed(sequence, ids_of(engine.model, 40, 0), [39])])
    used = {one["kind"] for one in engine.model.ops}
    assert {kind for kind in range(len(KINDS)) if engine.spent[kind] > 0} == used
    before = engine.spent.copy()
    engine.step([Fed(sequence, [1], [0])], spent=engine.ffi.NULL)
    assert (engine.spent == before).all()


def test_scale_and_add_as_ops_of_their_own() -> None:
    """The head of a model whose residual stream is doubled, once by SCALE and once by ADD."""
    plain = Model(Shape(), seed=3)
    found = []
    for doubling in (op("SCALE", out=0, of=0, number=2.0), op("ADD", out=0, of=0, residual=0)):
        model = Model(Shape(), seed=3)
        model.ops.insert(len(model.ops) - 2, doubling)
        found.append(whole(Engine(LIBRARIES[0], model, threads=2), [3, 1, 4])[0])
    assert found[0] == found[1]
    # an RMS norm undoes the doubling, but for its epsilon
    one = np.frombuffer(found[0][0], np.float32)
    np.testing.assert_allclose(one, plain.truth([3])[0], atol=1e-2)


# ---- what is refused ----


def refusal(engine: Engine, fed: Sequence[Fed], **changes: Any) -> tuple[int, int]:
    before = bytes(engine.memory)
    with pytest.raises(StepError) as caught:
        engine.step(fed, **changes)
    assert bytes(engine.memory) == before
    code, number = caught.value.args
    assert engine.ffi.string(engine.cpu.pd_error_text(code))
    return code, number


FACTS, KIND, BUFFER, WIDTH, MATRIX, WEIGHT, LAYER, ORDER, SPANS, TABLE, IDS, SAMPLED, WORK = range(-6, -19, -1)


@pytest.mark.parametrize(
    ("number", "changes", "code"),
    [
        (0, {"kind": 99}, KIND),
        (0, {"kind": -1}, KIND),
        (0, {"out": 6}, BUFFER),
        (0, {"out": 2}, MATRIX),
        (1, {"out": 2}, WIDTH),
        (1, {"in": -1}, BUFFER),
        (1, {"weight": 0}, WEIGHT),
        (2, {"matrix": 0}, MATRIX),
        (2, {"out": 1}, BUFFER),
        (2, {"residual": 0}, WIDTH),
        (2, {"residual": 77}, BUFFER),
        (3, {"layer": 2}, LAYER),
        (3, {"in": 0}, WIDTH),
        (4, {"layer": -1}, LAYER),
        (4, {"out": 2}, BUFFER),
        (5, {"residual": 3}, BUFFER),
        (8, {"in": 2}, WIDTH),
        (8, {"out": 4}, BUFFER),
        (9, {"kind": KINDS.index("HEAD_NORM"), "heads": 7, "dim": 16}, WIDTH),
        (13, {"in": 2}, WIDTH),
    ],
)
def test_a_program_that_is_not_sound_is_refused_by_op(number: int, changes: dict[str, Any], code: int) -> None:
    engine = Engine(LIBRARIES[0], MODELS["fused"])
    for name, value in changes.items():
        setattr(engine.ops[number], name, value or engine.ffi.NULL if name in ("weight", "matrix") else value)
    assert refusal(engine, [Fed(engine.sequence(3), [1, 2, 3], [2])]) == (code, number)
    assert engine.cpu.pd_program_check(engine.program, engine.wrong_op) == code
    assert engine.wrong_op[0] == number


@pytest.mark.parametrize(
    "changes",
    [
        {"ops": 0}, {"buffers": 65}, {"buffers": 0}, {"vocab": 0}, {"heads": 3}, {"kv_heads": 0}, {"head_dim": 20},
        {"head_dim": 272}, {"rope_dims": 17}, {"rope_dims": 32}, {"block_tokens": 48}, {"kv_dtype": 3},
        {"int8_activations": 2},
        {"positions": 0},
    ],
)  # fmt: skip
def test_facts_that_do_not_fit_together_are_refused(changes: dict[str, int]) -> None:
    engine = Engine(LIBRARIES[0], MODELS["fused"])
    for name, value in changes.items():
        setattr(engine.program, name, value)
    assert engine.cpu.pd_program_check(engine.program, engine.wrong_op) == FACTS
    assert engine.wrong_op[0] == -1
    assert engine.cpu.pd_step_bytes(engine.program, 1, 1, 1) == FACTS


def test_ops_that_need_all_tokens_stand_before_the_selection() -> None:
    for kind, fields in (("EMBED", {"out": 0}), ("SELECT", {"out": 0, "in": 0}), ("ROPE_WRITE_KV", {"in": 2})):
        engine = Engine(LIBRARIES[0], MODELS["fused"])
        last = len(engine.model.ops) - 2
        engine.ops[last].kind = KINDS.index(kind)
        for name, value in fields.items():
            setattr(engine.ops[last], name, value)
        assert refusal(engine, [Fed(engine.sequence(1), [1], [0])]) == (ORDER, last)


def test_a_step_that_does_not_fit_is_refused_and_touches_nothing() -> None:
    engine = Engine(LIBRARIES[0], MODELS["fused"], threads=2)
    ffi = engine.ffi

    def fed(sample: Sequence[int] = (2,), ids: Sequence[int] = (1, 2, 3), tokens: int = 0) -> list[Fed]:
        return [Fed(Sequence_(engine.sequence(100).table, tokens), ids, sample)]

    def ints(*values: int) -> Any:
        return ffi.new("int32_t[]", values)

    assert refusal(engine, fed(), tokens=4) == (SPANS, -1)
    assert refusal(engine, fed(), tokens=0) == (SPANS, -1)
    assert refusal(engine, fed(), spans=0) == (SPANS, -1)
    assert refusal(engine, fed(), count=ints(-3)) == (SPANS, -1)
    assert refusal(engine, fed(), start=ints(-1)) == (SPANS, -1)
    assert refusal(engine, fed(), start=ints(699)) == (SPANS, -1)
    assert refusal(engine, fed(), start=ints(2**31 - 1)) == (SPANS, -1)
    assert refusal(engine, fed(tokens=110)) == (TABLE, -1)
    assert refusal(engine, fed(), table=ints(-1)) == (TABLE, -1)
    assert refusal(engine, fed(), table=ints(7)) == (TABLE, -1)
    for block in (-1, 200, 2**31 - 1):
        assert refusal(engine, fed(), tables=ints(block)) == (TABLE, -1)
    assert refusal(engine, fed(ids=(1, 2, 101))) == (IDS, -1)
    assert refusal(engine, fed(ids=(1, 2, -1))) == (IDS, -1)
    assert refusal(engine, fed(sample=(2, 1))) == (SAMPLED, -1)
    assert refusal(engine, fed(sample=(1, 1))) == (SAMPLED, -1)
    assert refusal(engine, fed(sample=(3,))) == (SAMPLED, -1)
    assert refusal(engine, fed(sample=(-1,))) == (SAMPLED, -1)
    size = engine.cpu.pd_step_bytes(engine.program, 3, 3, 2)
    assert refusal(engine, fed(), work_bytes=size - 1) == (WORK, -1)
    assert refusal(engine, fed(), work=ffi.NULL) == (WORK, -1)
    assert engine.step(fed())[0].shape == (1, 101)


fields = st.sampled_from(["kind", "out", "in", "residual", "layer", "first", "heads", "dim"])
numbers = st.one_of(st.integers(-2, 12), st.sampled_from([2**31 - 1, -(2**31), 64, 128]))


@given(st.lists(st.tuples(st.integers(0, 20), fields, numbers), min_size=1, max_size=3))
def test_whatever_is_done_to_a_program_it_runs_or_is_refused(changes: list[tuple[int, str, int]]) -> None:
    """Nothing outside working memory, logits, health and the pool's own slots is written; `Engine.step` looks."""
    engine = Engine(LIBRARIES[0], MODELS["quantised"], threads=2)
    for number, name, value in changes:
        setattr(engine.ops[number], name, value)
    sequence = engine.sequence(9)
    other = engine.kv(Sequence_(engine.free[:5], 80))
    with contextlib.suppress(StepError):
        engine.step([Fed(sequence, [1, 2, 3], [2])])
    assert engine.kv(Sequence_(engine.free[:5], 80)) == other
