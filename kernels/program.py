"""A model as a program: which operations, in which order, on which buffers. Data alone; a backend runs it.

A step feeds T tokens, several sequences' concatenated. Every buffer is fp32 [T, width]; behind `Select` it is
[S, width], S being the tokens that want logits. Tensors are named, not loaded: a backend packs them as it computes.

    Embed ─► per layer: RmsNorm ─ Linear qkv ─ (HeadNorm) ─ RopeWriteKV ─ Attention ─ Linear o (+ x)
                        RmsNorm ─ Linear gate, up ─ SwiGLU ─ Linear down (+ x)
          ─► RmsNorm ─► Logits

`Select` stands in the last layer, behind its KV: of what follows only sampled tokens are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kernels.rope import RopeTables
from shared.model.tensors import Tensor


@dataclass(frozen=True)
class Buffer:
    """fp32 [T, width]; buffers of one program differ in `index`."""

    index: int
    width: int


@dataclass(frozen=True)
class Embed:
    """out = table[ids] * scale; `table` [vocab, width]."""

    out: Buffer
    table: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class RmsNorm:
    """out = x / sqrt(mean(x^2) + eps) * weight, over each row; `weight` [width]."""

    out: Buffer
    x: Buffer
    weight: Tensor
    eps: float


@dataclass(frozen=True)
class HeadNorm:
    """QK-norm: RmsNorm, in place, of each of `heads` heads of `weight`'s width from column `first` of x on."""

    x: Buffer
    first: int
    heads: int
    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Linear:
    """out = x @ W^T (+ residual), W being `weights` [out_i, in] stacked along `out`.

    `residual` may be the buffer `out` itself, never x.
    """

    out: Buffer
    x: Buffer
    weights: tuple[Tensor, ...]
    residual: Buffer | None = None


@dataclass(frozen=True)
class RopeWriteKV:
    """Rotates the q and k heads of `qkv` [T, (heads + 2 kv_heads) * head_dim] in place; stores k and v in the pool.

    KV is rounded once, here. A token whose KV is not finite once rounded is marked in the step's health.
    """

    qkv: Buffer
    layer: int


@dataclass(frozen=True)
class Attention:
    """Causal, each token over its own sequence as it lies in the pool: q heads of `qkv` -> out [T, heads * head_dim].

    Never multiplies a slot that was not written, not even by zero.
    """

    out: Buffer
    qkv: Buffer
    layer: int
    scale: float


@dataclass(frozen=True)
class SwiGLU:
    """out = silu(gate) * up, x [T, 2 * width] being gate and up side by side."""

    out: Buffer
    x: Buffer


@dataclass(frozen=True)
class Select:
    """From here on these buffers hold the sampled tokens alone, and the step consists of them."""

    buffers: tuple[Buffer, ...]


@dataclass(frozen=True)
class Logits:
    """Logits [S, vocab] = x @ W^T."""

    x: Buffer
    weight: Tensor


MatrixOp: TypeAlias = Embed | Linear | Logits
"""Ops whose weights are matrices; the others' are vectors, or none."""

Op: TypeAlias = Embed | RmsNorm | HeadNorm | Linear | RopeWriteKV | Attention | SwiGLU | Select | Logits


@dataclass(frozen=True)
class Program:
    """`starts[n]`: index of layer n's first op."""

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    starts: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope: RopeTables

    @property
    def layers(self) -> int:
        """Layers in all."""
        return len(self.starts)

    def shortened(self, layers: int | None) -> range | list[int]:
        """Indices of the ops of a run through the first `layers` - 1 layers and the last one (None: all)."""
        if layers is None or layers >= self.layers:
            return range(len(self.ops))
        return [*range(self.starts[layers - 1]), *range(self.starts[-1], len(self.ops))]


class Builder:
    """Collects a program's ops. `buffer` gives the same one for the same name, so layers share their buffers."""

    def __init__(self, *, heads: int, kv_heads: int, head_dim: int, vocab: int, rope: RopeTables) -> None:
        self.ops: list[Op] = []
        self._facts = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "vocab": vocab}
        self._rope = rope
        self._buffers: dict[str, Buffer] = {}
        self._starts: list[int] = []

    def buffer(self, name: str, width: int) -> Buffer:
        """The buffer called `name`; ValueError when it was made with another width."""
        found = self._buffers.setdefault(name, Buffer(len(self._buffers), width))
        if found.width != width:
            raise ValueError(f"buffer {name} is {found.width} wide, not {width}")
        return found

    def add(self, *ops: Op) -> None:
        """Appends ops."""
        self.ops += ops

    def begin_layer(self) -> None:
        """What is added next is the next layer's."""
        self._starts.append(len(self.ops))

    def program(self) -> Program:
        """The program so far, checked: every width fits, every weight has the shape that its place asks for."""
        program = Program(
            tuple(self.ops),
            tuple(self._buffers.values()),
            tuple(self._starts),
            rope=self._rope,
            **self._facts,
        )
        for number, op in enumerate(program.ops):
            try:
                _check(op, program)
            except ValueError as error:
                raise ValueError(f"op {number} ({type(op).__name__}): {error}") from None
        return program


def _equal(what: str, one: object, other: object) -> None:
    if one != other:
        raise ValueError(f"{what}: {one} and {other} differ")


def _check(op: Op, program: Program) -> None:
    attended = program.heads * program.head_dim
    packed = attended + 2 * program.kv_heads * program.head_dim
    match op:
        case Embed():
            _equal("table", op.table.shape, (program.vocab, op.out.width))
        case RmsNorm():
            _equal("weight", op.weight.shape, (op.x.width,))
            _equal("out", op.out.width, op.x.width)
        case HeadNorm():
            if op.first + op.heads * op.weight.shape[0] > op.x.width:
                raise ValueError(f"{op.heads} heads of {op.weight.shape[0]} from {op.first} on, of {op.x.width}")
        case Linear():
            _equal("inputs", {w.shape[1] for w in op.weights}, {op.x.width})
            _equal("outputs", sum(w.shape[0] for w in op.weights), op.out.width)
            if op.residual is not None:
                _equal("residual", op.residual.width, op.out.width)
            if op.x in (op.out, op.residual):
                raise ValueError("x is overwritten while it is read")
        case RopeWriteKV():
            _equal("qkv", op.qkv.width, packed)
        case Attention():
            _equal("qkv", op.qkv.width, packed)
            _equal("out", op.out.width, attended)
        case SwiGLU():
            _equal("x", op.x.width, 2 * op.out.width)
        case Select():
            pass
        case Logits():
            _equal("weight", op.weight.shape, (program.vocab, op.x.width))


def tensors_of(op: Op) -> Sequence[Tensor]:
    """The weights that an op needs, in its order."""
    match op:
        case Embed():
            return (op.table,)
        case RmsNorm() | HeadNorm() | Logits():
            return (op.weight,)
        case Linear():
            return op.weights
        case _:
            return ()
