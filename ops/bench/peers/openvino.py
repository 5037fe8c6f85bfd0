"""OpenVINO GenAI: reads the GGUF file itself, in process, with int8 activations of its own making.

As a program, `python -m ops.bench.peers.openvino MODEL TOKENS THREADS` in its own environment: a pipeline that takes
requests as JSON lines on stdin and answers on stdout. No HTTP lies between; its clock is the pipeline's own.
"""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from ops.bench.peers.environment import install, make, pins, settle, settled
from ops.bench.peers.interface import Place, Say, Timeline
from ops.bench.peers.processes import Group

CACHE_GB = 3
BATCHED = (256, 512)
"""Most tokens of a step, among which the best is searched."""


class OpenVino:
    """The peer. A setting is `FORMAT-BATCHED`."""

    name = "openvino"
    told = "in process"

    def prepare(self, place: Place, say: Say) -> None:
        """One package from the index."""
        if not settled(place, self.name):
            make(place, say)
            say("openvino: installing")
            install(place, "--requirement", str(pins(self.name)))
            settle(place, self.name)

    def settings(self, place: Place, streams: int) -> list[str]:
        """The file as shipped; its Q8_0 gives broken text, its F16 is slower in every row."""
        return [f"q4_1-{batched}" for batched in BATCHED]

    def start(self, place: Place, setting: str) -> "OpenVinoEngine":
        """Loads the model: seconds."""
        return OpenVinoEngine(place, int(setting.rpartition("-")[2]))


class OpenVinoEngine:
    """Its process, from the side that measures."""

    def __init__(self, place: Place, batched: int) -> None:
        command = [str(place.python), "-m", __name__, str(place.gguf), str(batched), str(place.threads)]
        self._group = Group(command, place.root / "log", talks=True)
        self.pause, self.resume, self.stop = self._group.pause, self._group.resume, self._group.stop
        self._answer()

    def _answer(self) -> Any:
        pipe = self._group.process.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            raise RuntimeError(f"openvino ended with code {self._group.process.wait()}:\n{self._group.tail()}")
        return json.loads(line)

    def _ask(self, prompts: Sequence[Sequence[int]], tokens: int) -> Any:
        pipe = self._group.process.stdin
        assert pipe is not None
        pipe.write(json.dumps({"prompts": [list(ids) for ids in prompts], "tokens": tokens}) + "\n")
        pipe.flush()
        return self._answer()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Timeline]:
        """See `Engine.generate`."""
        return [Timeline(tuple(each["arrivals"]), len(each["ids"])) for each in self._ask(prompts, tokens)]

    def answer(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """See `Engine.answer`."""
        return list(self._ask([prompt], tokens)[0]["ids"])


def serve(model: str, batched: int, threads: int) -> None:
    """The pipeline's side, until stdin ends."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_batched_tokens = batched
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}, {}
    )
    number = 0
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = wanted["tokens"]
        config.do_sample = False
        config.ignore_eos = True
        tensors = [openvino.Tensor(np.array([ids], np.int64)) for ids in wanted["prompts"]]
        found: list[dict[str, list[Any]]] = [{"ids": [], "arrivals": []} for _ in tensors]
        begun = time.perf_counter()
        handles = []
        for tensor in tensors:
            handles.append(pipeline.add_request(number, tensor, config))
            number += 1
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - begun
            for handle, each in zip(handles, found, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        each["ids"] += output.generated_ids
                        each["arrivals"] += [now] * len(output.generated_ids)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
