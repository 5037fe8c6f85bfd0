"""The `transformers` process, from the side that measures."""

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]


class TransformersPeer:
    """Starts the peer, asks it, ends it. Blocking calls: run them in a thread beside an event loop."""

    def __init__(self, source: str, threads: int) -> None:
        command = [sys.executable, "-m", "ops.bench.transformers_peer", source, str(threads)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
        )
        if not self._answer().get("ready"):
            raise RuntimeError("the transformers peer did not start")

    def __enter__(self) -> "TransformersPeer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the transformers peer ended with code {self._process.wait()}")
        return cast("dict[str, Any]", json.loads(line))

    def run(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Greedy: `ttft_s`, `decode_s` (of the tokens after the first), `ids`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": ids, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()
