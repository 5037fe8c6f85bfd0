"""`perdure doctor` on a real stack: while it serves, after `kill -9` of everything, and when it may not mend."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from ops.doctor.exam import examine
from shared.config import load_config
from shared.messages.front import Sampling
from tests.e2e.kit import Watched, ask, client_of, oracle, prompt, settled, stack
from tests.e2e.kit import shared_stack as stack_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shared() -> Iterator[Watched]:
    with stack_of() as made:
        yield made


async def doctor(made: Watched, *options: str) -> "tuple[int, dict[str, object], str]":
    """Exit code, the JSON object, and what it said on stderr, of the command as a user runs it."""
    run = await trio.run_process(
        [sys.executable, "-m", "ops.cli", "doctor", "--json", *options],
        cwd=ROOT,
        env=made.environ,
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    return run.returncode, json.loads(run.stdout or b"{}"), run.stderr.decode()


def names(report: "dict[str, object]", level: str) -> list[str]:
    found = report["findings"]
    assert isinstance(found, list)
    return [finding["name"] for finding in found if finding["level"] == level]


async def test_the_doctor_is_content_while_the_stack_serves_and_holds_nothing_up(shared: Watched) -> None:
    """P16, in short: the index is read by another process again and again while the store writes it."""
    async with client_of(shared) as client, trio.open_nursery() as nursery:
        answered = 0

        async def load() -> None:
            nonlocal answered
            for number in range(30):
                ids = prompt(100 + number, 64)
                assert (await ask(client, ids, 8)).ids == oracle(ids, 8)
                answered += 1
            nursery.cancel_scope.cancel()

        nursery.start_soon(load)
        while True:
            code, report, said = await doctor(shared)
            assert (code, names(report, "fault"), said) == (0, [], ""), report
    assert answered == 30
    await settled(shared)
    code, report, _ = await doctor(shared)
    assert code == 0
    assert {"services", "arena", "disk", "journal"} <= set(names(report, "ok"))


async def test_a_repair_under_a_running_stack_is_refused(shared: Watched) -> None:
    code, report, said = await doctor(shared, "--repair")
    assert (code, report) == (4, {})
    assert "taken by process" in said


async def test_after_a_kill_of_everything_there_is_no_fault_and_a_repair_leaves_all_that_holds() -> None:
    async with stack() as made:
        async with client_of(made) as client:
            for number in range(8):
                await ask(client, prompt(number, 64), 8)
            sampling = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)
            async with client.generate(ids=prompt(9, 200), sampling=sampling) as stream:
                async for _ in stream:
                    made.kill_all()
                    break
        config = load_config(environ=made.environ)
        report = examine(made.places, config)
        assert report.content, report.plain()
        code, mended, _ = await doctor(made, "--repair")
        assert (code, mended["content"]) == (0, True), mended
        others = {"arena-dead", "run-dir-dead"}  # of homes that other tests leave and remove meanwhile
        assert set(names(mended, "warning")) <= others
        await made.start()
        assert (await doctor(made))[0] == 0
        async with client_of(made) as client:
            for number in range(8):
                result = await ask(client, prompt(number, 64), 8)
                assert result.ids == oracle(prompt(number, 64), 8)
                assert sum(result.finish.usage.cached_by_tier.values()) >= 48
