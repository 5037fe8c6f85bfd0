"""The CPU backend: programs run by the C kernels, exact whatever the batch, the chunks, the threads and the cache."""

from dataclasses import dataclass

import structlog

from kernels.cpu import converted
from kernels.cpu.library import NoLibrary, declarations, library
from kernels.cpu.model import CpuModel
from kernels.cpu.packing import INT8_KINDS, Matrix, Plan, is_widened, pack, packed_as
from kernels.interface import Footprint, Progress, Unfit, Weights
from kernels.program import MatrixOp, Op, Program, tensors_of
from shared.config import ConfigError
from shared.model.tensors import Tensor

VERSION = 1
"""Raised when a change of the kernels changes a bit of KV or logits; the golden digests tell."""

INT8_VERSION = 1
"""The same for what only products of 8-bit activations change."""

PACKING = "panels-1"
"""Raised when panels lie otherwise, so that packed files are made again."""

DIM_STEP, MOST_DIM, LEAST_BLOCK = 16, 256, 16


class Cpu:
    """Implements `kernels.interface.Backend` on `threads` compute threads, the caller's being the first.

    `int8`: products with quantised weights round their activations to 8 bits, which is another numerics, as exact.
    Unfit where no compiled library runs, and for heads or blocks that the kernels don't take (see `choose_backend`).
    """

    name = "cpu"
    exact = True
    kv_dtype = "fp16"

    def __init__(self, threads: int, *, head_dim: int, block_tokens: int = 0, int8: bool = False) -> None:
        if head_dim % DIM_STEP or head_dim > MOST_DIM:
            raise Unfit(f"heads of {head_dim} are no multiple of {DIM_STEP} up to {MOST_DIM}")
        if 0 < block_tokens < LEAST_BLOCK:
            raise Unfit(f"kv.block_tokens is {block_tokens}, and the kernels take {LEAST_BLOCK} or more")
        try:
            self._library = library()
        except NoLibrary as error:
            raise Unfit(str(error)) from error
        self.threads = threads
        self.int8 = int8
        self.numerics = f"cpu-{VERSION}/int8-{INT8_VERSION}" if int8 else f"cpu-{VERSION}"
        self._log = structlog.get_logger()

    @property
    def isa(self) -> str:
        """The instruction set in use; results don't depend on it."""
        return str(declarations().string(self._library.pd_isa()).decode())

    def footprint(self, program: Program, tokens: int, rows: int, context: int) -> Footprint:
        """See `Backend.footprint`: exact, as every buffer is known beforehand."""
        parts = _parts(program)
        weights = sum(part.nbytes for part in parts.values())
        weights += program.rope.nbytes + sum(4 * tensor.shape[0] for op in program.ops for tensor in _vectors(op))
        step = CpuModel.step_bytes(self._library, program, tokens, context, self.threads, self.int8)
        return Footprint(weights, step + 4 * rows * program.vocab, exact=True)

    def load(self, program: Program, kept: Weights | None, progress: Progress) -> CpuModel:
        """See `Backend.load`: maps the packed file, or packs and leaves one behind for the next start.

        ConfigError when activations are to be int8 and no product is of weights that take them.
        """
        parts = _parts(program)
        self._check_int8(parts)
        widened = [one.name for part in parts.values() for one in part.tensors if is_widened(one)]
        if widened:
            reason = "their scales change within 32 inputs; they are kept in fp32, which takes four times the room"
            self._log.warning("weights_in_fp32", tensors=len(widened), first=widened[0], reason=reason)
        data = self._mapped(parts, kept, progress) if kept else None
        if data is None:
            data = {}
            for name, part in parts.items():
                data[name] = pack(part.tensors).data
                progress(len(data), len(parts))
        matrices = {name: part.matrix(data[name]) for name, part in parts.items()}
        listed = [matrices.get(_name(op)) for op in program.ops]
        return CpuModel(self._library, program, listed, self.threads, self.int8)

    def _check_int8(self, parts: "dict[str, _Part]") -> None:
        if self.int8 and not any(part.plan.takes_int8 for part in parts.values()):
            found = ", ".join(sorted({tensor.kind for part in parts.values() for tensor in part.tensors}))
            known = ", ".join(sorted(INT8_KINDS))
            raise ConfigError(
                f"model.activations is int8, which takes weights in {known}; this file's are {found}: "
                "take fp32, or a file in one of those"
            )

    def _mapped(
        self, parts: "dict[str, _Part]", kept: Weights, progress: Progress
    ) -> "dict[str, converted.Bytes] | None":
        """The packed file's parts, made first where need be; None, with a warning, where it can't be kept."""
        path = converted.path_of(kept.directory, kept.digest, PACKING)
        sizes = {name: part.nbytes for name, part in parts.items()}
        done = 0

        def packed(name: str) -> converted.Bytes:
            nonlocal done
            done += 1
            progress(done, len(parts))
            return pack(parts[name].tensors).data

        try:
            return converted.opened(path, sizes)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._log.warning("packed_weights", path=str(path), reason=str(error), hint="they are packed again")
        try:
            converted.write(path, sizes.items(), packed)
            return converted.opened(path, sizes)
        except OSError as error:
            self._log.warning("packed_weights", path=str(path), reason=str(error), hint="each start packs them anew")
            return None


@dataclass(frozen=True)
class _Part:
    """A matrix to be: its tensors and what they pack into."""

    tensors: tuple[Tensor, ...]
    plan: Plan

    @property
    def nbytes(self) -> int:
        """Bytes once packed."""
        return self.plan.nbytes

    def matrix(self, data: converted.Bytes) -> Matrix:
        """Over its packed bytes."""
        return Matrix(self.plan, data)


def _name(op: Op) -> str:
    """Of an op's matrix; "" when it has none."""
    return "+".join(tensor.name for tensor in tensors_of(op)) if isinstance(op, MatrixOp) else ""


def _vectors(op: Op) -> tuple[Tensor, ...]:
    return () if isinstance(op, MatrixOp) else tuple(tensors_of(op))


def _parts(program: Program) -> dict[str, _Part]:
    """Matrices by name; a tied table is one for both its uses."""
    parts: dict[str, _Part] = {}
    for op in program.ops:
        if isinstance(op, MatrixOp):
            part = _Part(tuple(tensors_of(op)), packed_as(tensors_of(op)))
            known = parts.setdefault(_name(op), part)
            if any(one is not other for one, other in zip(known.tensors, part.tensors, strict=True)):
                raise ValueError(f"two different weights are called {_name(op)}")
    return parts
