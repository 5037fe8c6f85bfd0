"""Prompts for the demo, benchmarks and chaos: drawn with a fixed seed from the project's own documents and sources."""

import random
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@lru_cache(maxsize=1)
def corpus() -> tuple[str, ...]:
    """Paragraphs of the project's own text, in a fixed order; file names sorted."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    files += sorted(path for top in ("shared", "services", "kernels") for path in (ROOT / top).rglob("*.py"))
    paragraphs = [part.strip() for path in files for part in path.read_text().split("\n\n")]
    return tuple(part for part in paragraphs if len(part) > 40)


def passage(seed: int, characters: int) -> str:
    """At least `characters` of text; different seeds share no first paragraph, by a heading that names the seed."""
    rng = random.Random(seed)
    parts = [f"Notes, part {seed}."]
    while sum(map(len, parts)) < characters:
        parts.append(rng.choice(corpus()))
    return "\n\n".join(parts)
