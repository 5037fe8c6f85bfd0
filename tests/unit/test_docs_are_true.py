"""What the documentation says is what the code does."""

import json
import re
from pathlib import Path

import click
import msgspec
import pytest

from kernels.cpu import packing
from ops.cli import main
from shared.config import Config
from shared.model import gguf_header
from shared.model import safetensors_header as st_header
from shared.model.tensors import BLOCK_BYTES, BLOCK_VALUES

ROOT = Path(__file__).resolve().parents[2]


def documented_keys() -> dict[tuple[str, str], str]:
    keys: dict[tuple[str, str], str] = {}
    section = ""
    for line in (ROOT / "docs" / "configuration.md").read_text().splitlines():
        if match := re.fullmatch(r"## \[(\w+)\]", line):
            section = match.group(1)
        elif match := re.match(r"\| `(\w+)` \| `([^`]*)` \|", line):
            keys[section, match.group(1)] = match.group(2)
    return keys


def real_keys() -> dict[tuple[str, str], str]:
    keys = {}
    for section in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(section.type):
            value = getattr(getattr(Config(), section.name), field.name)
            keys[section.name, field.name] = json.dumps(value)
    return keys


def test_every_configuration_key_is_documented_with_its_default() -> None:
    assert documented_keys() == real_keys()


def formats_table() -> list[str]:
    """The rows of docs/models.md that the code says."""
    rows = []
    for kind, values in BLOCK_VALUES.items():
        files = [
            name for name, kinds in (("GGUF", gguf_header.KINDS), ("safetensors", st_header.KINDS)) if kind in kinds
        ]
        panels = packing.FORMATS[kind]
        bits = packing.panel_bytes(panels, 256) / packing.PANEL / 32
        int8 = "yes" if kind in packing.INT8_KINDS else "no"
        rows.append(
            f"| {kind} | {', '.join(files)} | {8 * BLOCK_BYTES[kind] / values:g} | {panels} | {bits:g} | {int8} |"
        )
    return rows


def test_the_table_of_weight_formats_is_the_codes() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    found = [line for line in text.splitlines() if re.match(r"\| \w+ \| (GGUF|safetensors)", line)]
    assert found == formats_table(), "\n".join(formats_table())


def commands(group: click.Group, path: str) -> list[str]:
    context = click.Context(group)
    found = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        if isinstance(command, click.Group):
            found += commands(command, f"{path} {name}")
        else:
            found.append(f"{path} {name}")
    return found


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for command in commands(main, "perdure"):
        assert command in readme, f"README.md does not mention `{command}`"


def test_every_command_of_the_readme_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    known = commands(main, "perdure")
    for used in re.findall(r"(?:\.venv/bin/|`)(perdure(?: [a-z]+)+)", readme):
        assert any(used.startswith(command) or command.startswith(used) for command in known), used


@pytest.mark.parametrize(
    "target", ["setup", "lint", "test", "demo", "serve", "bench", "bench-peers", "profile", "fuzz"]
)
def test_make_targets_exist_and_the_readme_has_the_two_commands(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    if target in ("test", "demo"):
        assert f"make {target}" in (ROOT / "README.md").read_text()


def test_ci_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for command in ("make lint", "make test", "make demo"):
        assert command in script
