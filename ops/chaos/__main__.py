"""`make chaos KILLS=n SEED=s [MINUTES=m] [MODEL=toy|tiny|smollm2]`, or `python -m ops.chaos`.

Exit codes: 0 every promise held, 1 one did not (the seed, the command and the kept files are printed), 130 interrupted.
"""

import argparse
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import trio
from rich.console import Console

from ops.bench.commit import commit
from ops.chaos import models
from ops.chaos.campaign import Campaign
from ops.chaos.report import facts_of, show, together, write
from ops.chaos.schedule import WEATHERS
from ops.chaos.tmpfs import small_tmpfs
from ops.chaos.volume import volume
from ops.cli.exits import FAULT, INTERRUPTED, OK
from ops.cli.logs import quiet_logs
from ops.cli.serve import check_platform
from ops.models.download import pull
from ops.models.progress import shown
from ops.stack import ROOT, Stack
from shared.config import ModelConfig
from shared.paths import default_home


def subject_of(name: str, folder: Path) -> models.Subject:
    """The model to run on; its files are fetched, or written into `folder`."""
    if name == "toy":
        return models.toy()
    if name == "tiny":
        return models.tiny(folder)
    with shown() as progress:
        return models.smollm2(str(pull(ModelConfig().source, default_home() / "models", progress)))


def keep(stack: Stack, seed: int) -> Path:
    """Copies what explains a violation: log, home (journal, ledger, disk tier)."""
    kept = ROOT / "results" / f"chaos-failed-{seed}"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(stack.base, kept)
    if not (kept / "home").exists():
        shutil.copytree(stack.places.home, kept / "home")
    return kept


def main() -> int:
    """Runs one campaign on a home of its own, which is removed at the end."""
    parser = argparse.ArgumentParser(prog="python -m ops.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0.0, help="end earlier, after so long; 0: never")
    parser.add_argument("--model", choices=("toy", "tiny", "smollm2"), default="toy")
    parser.add_argument("--weather", choices=WEATHERS, help="this one all the time, and no other")
    parser.add_argument("--quiet", action="store_true", help="only the table")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    quiet_logs()
    check_platform()
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def say(text: str) -> None:
        if not given.quiet:
            console.print(f"[dim]·[/dim] {text}", highlight=False)

    with tempfile.TemporaryDirectory(prefix="perdure-chaos-") as folder, ExitStack() as mounts:
        subject = subject_of(given.model, Path(folder))
        settings = subject.settings | {"PERDURE_SUPERVISE__HANG_S": str(subject.hang_s)}
        arena_dir = mounts.enter_context(small_tmpfs(Path(folder) / "shm", subject.tmpfs_bytes))
        if arena_dir is None:
            say("no tmpfs can be mounted here: the arena lies in /dev/shm, and is as large as it asks for")
        else:
            settings["PERDURE_STORE__ARENA_DIR"] = str(arena_dir)
        disk = mounts.enter_context(volume(Path(folder) / "volume"))
        if disk is None:
            say("nor one for the home: that its disk is full is played by fault hooks")
        with Stack(settings, share_models=False, home=disk.home if disk is not None else None) as stack:
            weathers = (given.weather,) if given.weather else WEATHERS
            campaign = Campaign(stack, subject, given.seed, given.kills, given.minutes, say, disk, weathers)
            interrupted = False
            try:
                trio.run(campaign.run)
            except* KeyboardInterrupt:
                interrupted = True
            if interrupted:
                return INTERRUPTED
            facts = facts_of(campaign, commit()) | {"small_tmpfs": arena_dir is not None, "own_disk": disk is not None}
            path = write(facts, ROOT / "results")
            show(facts, console)
            console.print(f"written to {path}; {together(path, subject.name)}")
            if not campaign.violations:
                return OK
            kept = keep(stack, given.seed)
    again = f"make chaos KILLS={given.kills} SEED={given.seed} MODEL={given.model}"
    again += f" WEATHER={given.weather}" if given.weather else ""
    console.print(f"[red]broken promises; log and home are in {kept}; the same again: {again}[/red]")
    return FAULT


if __name__ == "__main__":
    sys.exit(main())
