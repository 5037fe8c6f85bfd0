"""`make readers` or `python -m ops.bench.readers`: many look at a stack at work, none is held up (P16, P31).

While requests with new prompts make the store write its index and the scheduler its ledger, other processes read both
without a pause: `perdure doctor` maps the index, four `perdure ledger list` read the rows, and for some seconds one
connection holds the ledger exclusively. Every answer must be right, no command may fail, rows must equal requests.
"""

import argparse
import json
import random
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field

import trio

from ops.client import connected
from ops.stack import ROOT, Stack
from services.scheduler.ledger_rows import read_ledger
from shared.messages.front import Sampling
from shared.model.toy import toy_generate

SEED = 7
TOY = {
    "PERDURE_MODEL__SOURCE": f"toy:{SEED}",
    "PERDURE_KV__POOL_BYTES": "1 MiB",
    "PERDURE_STORE__HOST_BYTES": "4 MiB",
    "PERDURE_STORE__DISK_BYTES": "16 MiB",
}
LEDGER_READERS = 4
CUSTOMERS = 3
PROMPT_TOKENS, TOKENS = 96, 8
PATIENCE_S = 60.0


@dataclass
class Outcome:
    """What was counted; `wrong` says what should not have been, in words."""

    requests: int = 0
    rows: int = 0
    doctors: int = 0
    lists: int = 0
    lock_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


async def soak(stack: Stack, *, seconds: float, requests: int, lock_s: float) -> Outcome:
    """Runs on a started toy stack until `seconds` have passed, `requests` are answered, the lock was held, and each
    kind of reader has come at least once.
    """
    outcome = Outcome()
    began = trio.current_time()
    enough = trio.Event()

    def done() -> bool:
        if trio.current_time() - began >= seconds and outcome.requests >= requests:
            return bool(outcome.doctors and outcome.lists >= LEDGER_READERS and outcome.lock_s)
        return False

    async with trio.open_nursery() as nursery:
        for number in range(CUSTOMERS):
            nursery.start_soon(_customer, stack, number, outcome, done, enough)
        nursery.start_soon(_again_and_again, stack, ["doctor", "--json"], outcome, enough)
        for _ in range(LEDGER_READERS):
            nursery.start_soon(_again_and_again, stack, ["ledger", "list", "--json"], outcome, enough)
        nursery.start_soon(_lock, stack, outcome, lock_s)
    with trio.move_on_after(PATIENCE_S):
        while outcome.rows < outcome.requests:
            outcome.rows = len(read_ledger(stack.places.ledger, limit=outcome.requests + 1))
            await trio.sleep(0.05)  # a poll of another process's file
    if outcome.rows != outcome.requests:
        outcome.wrong.append(f"{outcome.rows} rows in the ledger, {outcome.requests} requests were answered")
    await _command(stack, ["doctor", "--json"], outcome)
    return outcome


async def _customer(stack: Stack, number: int, outcome: Outcome, done: Callable[[], bool], enough: trio.Event) -> None:
    """Prompts that nobody had before, so that blocks are saved and evicted on every tier."""
    rng = random.Random(number)
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    async with connected(stack.places) as client:
        while not enough.is_set():
            ids = [rng.randrange(256) for _ in range(PROMPT_TOKENS)]
            async with client.generate(ids=ids, sampling=sampling) as stream:
                result = await stream.result()
            outcome.requests += 1
            if result.ids != tuple(toy_generate(SEED, ids, TOKENS)) or result.finish.error:
                outcome.wrong.append(
                    f"request {result.id}: {result.finish.error or 'other tokens than the model says'}"
                )
            if done():
                enough.set()


async def _again_and_again(stack: Stack, arguments: list[str], outcome: Outcome, enough: trio.Event) -> None:
    while not enough.is_set():
        await _command(stack, arguments, outcome)


async def _command(stack: Stack, arguments: list[str], outcome: Outcome) -> None:
    run = await trio.run_process(
        [sys.executable, "-m", "ops.cli", *arguments],
        cwd=ROOT,
        env=stack.environ,
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    if arguments[0] == "doctor":
        outcome.doctors += 1
    else:
        outcome.lists += 1
    if run.returncode:
        said = (run.stderr or run.stdout).decode(errors="replace").strip()
        outcome.wrong.append(f"perdure {' '.join(arguments)} ended with {run.returncode}: {said[-500:]}")


async def _lock(stack: Stack, outcome: Outcome, lock_s: float) -> None:
    """Holds the ledger exclusively, as a careless tool would; its writer waits, requests do not."""
    while not read_ledger(stack.places.ledger, limit=1):  # noqa: ASYNC110 - another process makes it
        await trio.sleep(0.05)
    with closing(sqlite3.connect(stack.places.ledger, isolation_level=None, timeout=PATIENCE_S)) as db:
        db.execute("begin exclusive")
        before = outcome.requests
        await trio.sleep(lock_s)
        outcome.lock_s = lock_s
        if outcome.requests == before:
            outcome.wrong.append(f"no request was answered in the {lock_s:g} s in which the ledger was locked")
        db.execute("rollback")


def main() -> int:
    """0 when nothing was wrong; prints the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--lock-s", type=float, default=3.0)
    arguments = parser.parse_args()

    async def run() -> Outcome:
        await stack.start()
        return await soak(stack, seconds=arguments.seconds, requests=arguments.requests, lock_s=arguments.lock_s)

    with Stack(TOY, share_models=False) as stack:
        outcome = trio.run(run)
    print(json.dumps(asdict(outcome)))
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
