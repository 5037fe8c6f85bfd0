"""Which backend serves: the exact one where it can, the reference with one warning where not, a refusal by name."""

import pytest

from kernels import choose_backend
from kernels.cpu import library
from shared.config import ConfigError


def test_auto_is_the_exact_backend_on_this_machine() -> None:
    choice = choose_backend("auto", 1, head_dim=64)
    assert (choice.backend.name, choice.backend.exact, choice.backend.kv_dtype, choice.warning) == (
        "cpu",
        True,
        "fp16",
        "",
    )


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.backend 'cuda' is unknown; known are auto, cpu, reference"):
        choose_backend("cuda", 1, head_dim=64)


def test_activations_of_8_bits_are_another_numerics_and_as_exact() -> None:
    plain, rounding = (choose_backend("auto", 1, head_dim=64, activations=one).backend for one in ("fp32", "int8"))
    assert rounding.exact
    assert rounding.numerics.startswith(f"{plain.numerics}/int8-")


def test_activations_that_cannot_be_had_are_refused_and_never_replaced() -> None:
    with pytest.raises(ConfigError, match=r"model\.activations 'int4' is unknown; known are fp32, int8"):
        choose_backend("auto", 1, head_dim=64, activations="int4")
    with pytest.raises(ConfigError, match="int8, which the reference backend does not compute: take cpu"):
        choose_backend("reference", 1, head_dim=64, activations="int8")
    with pytest.raises(ConfigError, match="activations is int8, for the cpu backend, but heads of 24 are no multiple"):
        choose_backend("auto", 1, head_dim=24, activations="int8")


@pytest.mark.parametrize(
    ("head_dim", "block_tokens", "said"),
    [
        (24, 0, "heads of 24 are no multiple of 16 up to 256"),
        (512, 0, "heads of 512 are no multiple of 16 up to 256"),
        (64, 8, "kv.block_tokens is 8, and the kernels take 16 or more"),
    ],
)
def test_what_the_kernels_do_not_take_is_served_by_the_reference_with_one_warning(
    head_dim: int, block_tokens: int, said: str
) -> None:
    choice = choose_backend("auto", 1, head_dim=head_dim, block_tokens=block_tokens)
    assert choice.backend.name == "reference"
    assert choice.warning.startswith(said)
    assert choose_backend("reference", 1, head_dim=head_dim).warning == ""
    with pytest.raises(ConfigError, match=f"model.backend is cpu, but {said}"):
        choose_backend("cpu", 1, head_dim=head_dim, block_tokens=block_tokens)


def test_a_machine_without_built_kernels_serves_on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.backend.library", lambda: library.load("sse9"))
    choice = choose_backend("auto", 1, head_dim=64)
    assert choice.backend.name == "reference"
    assert "_perdure_sse9.so is not built; `make setup` builds it and needs a C compiler" in choice.warning


def test_an_instruction_set_that_the_cpu_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, "sse9")
    with pytest.raises(ConfigError, match="PERDURE_CPU_ISA is 'sse9'; this CPU has"):
        choose_backend("cpu", 1, head_dim=64)
