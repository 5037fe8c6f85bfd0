"""How quick computing and loading were, in a small file of the home: plain JSON, replaced as a whole.

Losing it costs a few measurements, so it is never synced, and nothing that goes wrong with it is an error.
"""

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
"""A longer file is not ours."""


def read_rates(path: Path) -> dict[str, Any]:
    """What was saved, {} when there is nothing that can be read."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return {}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_rates(path: Path, rates: dict[str, Any]) -> bool:
    """Replaces the file; False when that can't be done, and the old one stands."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(rates))
        part.replace(path)
    except OSError:
        return False
    return True
