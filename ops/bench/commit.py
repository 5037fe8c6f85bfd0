"""Which code was measured."""

import subprocess

from ops.stack import ROOT


def commit() -> str:
    """The checkout's short commit, with + when files differ from it."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"
