"""The benchmark's switch: `serve` refuses it; with it nothing is written, and everything else goes on as ever."""

import subprocess
import sys
from pathlib import Path

from ops.stack import Stack
from services.scheduler.durable import Durable
from services.scheduler.records import Admit
from services.scheduler.settings import Settings
from shared.config import BenchConfig, Config, FaultsConfig
from shared.faults import Faults
from shared.paths import Places
from tests.engine_kit import counter, words
from tests.scheduler_world import World


def test_serve_refuses_to_keep_no_promise() -> None:
    with Stack({"PERDURE_BENCH__DURABLE": "false"}, share_models=False) as made:
        done = subprocess.run(
            [sys.executable, "-m", "ops.cli", "serve"], env=made.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "bench.durable = false keeps no promise" in done.stderr
        assert not made.places.home.exists()


def test_without_durability_no_byte_is_written_and_every_batch_counts_as_kept(tmp_path: Path) -> None:
    sizes = []
    for durable in (True, False):
        places = Places(tmp_path / str(durable))
        places.make()
        kept = Durable(places, Config(bench=BenchConfig(durable=durable)), Faults(FaultsConfig()), lambda *_: None)
        kept.journal.recover()
        empty = sum(path.stat().st_size for path in places.journal.iterdir())
        assert kept.write([Admit(1, 0.0, 0, 0, 0)])
        sizes.append(sum(path.stat().st_size for path in places.journal.iterdir()) - empty)
    assert sizes[0] > 0
    assert sizes[1] == 0


def test_without_durability_nothing_is_offered_to_the_store() -> None:
    for saves in (True, False):
        world = World(Settings(step_tokens=64, saves=saves), blocks=40, block_tokens=4, store=True)
        world.submit(words(33), 2)
        world.settle()
        assert bool(counter(world, "save_offered")) is saves
