"""A restart into code of other message or state versions stops all before it starts any; requests go on.

The versions are claimed in a configuration file, which every new process reads: to change it is to change the code.
"""

import json
from pathlib import Path

import trio

from ops.client import Client, connected
from shared.messages.base import PROTOCOL, pack_u32
from shared.messages.front import Generate, Sampling
from shared.versions import STATE
from tests.e2e.kit import DEADLINE_S, ask, client_of, oracle, prompt, settled, stack
from tests.e2e.test_commands import perdure

TOKENS = 600
SERVICES = ("store", "scheduler", "worker", "tokenizer", "detokenizer")


def claim(path: Path, **versions: int) -> None:
    lines = [f"announce_{name} = {number}" for name, number in versions.items()]
    path.write_text("\n".join(["[faults]", *lines]) + "\n")


async def begun(client: Client, ids: list[int], request_id: str) -> None:
    """A detached request that has drawn a token."""
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    request = Generate(id=request_id, ids=pack_u32(ids), sampling=sampling, detached=True)
    async with client.generate(request) as stream:
        await anext(stream)


def check_order(log: str) -> None:
    """No service of the second life starts before the last of the first has exited."""
    said = [json.loads(line[line.index("{") :]) for line in log.splitlines() if '"role": "supervise"' in line]
    told = [(line["event"], line.get("incarnation")) for line in said]
    assert told.count(("held", None)) == told.count(("started", 2)) == len(SERVICES)
    last_exit = max(at for at, line in enumerate(told) if line == ("exited", 1))
    assert last_exit < told.index(("started", 2))


async def test_another_state_format_restarts_the_whole_stack_and_fails_no_request(tmp_path: Path) -> None:
    config = tmp_path / "perdure.toml"
    claim(config)
    prompts = [prompt(number, 60 + number) for number in range(4)]
    async with stack(PERDURE_CONFIG=str(config)) as made, client_of(made) as client:
        results = {}

        async def one(number: int) -> None:
            results[number] = await ask(client, prompts[number], TOKENS)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(one, number)
            claim(config, state=99)
            said = await perdure(made, "restart", "worker")
        assert f"the code here has messages {PROTOCOL}, state 99" in said
        assert f"worker with messages {PROTOCOL}, state {STATE}" in said
        assert [line for line in said.splitlines() if "incarnation 2" in line] == [
            f"{name}: incarnation 2" for name in SERVICES
        ]
        assert {number: result.ids for number, result in results.items()} == {
            number: oracle(prompts[number], TOKENS) for number in range(4)
        }
        check_order(made.log_path.read_text())
        again = await perdure(made, "restart", "worker")
        assert again == "worker: incarnation 2 -> 3\n"  # they claim the same now: one service is enough
        await settled(made)


async def test_another_protocol_restarts_the_whole_stack_and_the_journal_goes_on(tmp_path: Path) -> None:
    config, ids, request_id = tmp_path / "perdure.toml", prompt(9, 80), "c" * 32
    claim(config)
    async with stack(PERDURE_CONFIG=str(config)) as made:
        async with client_of(made) as client:
            await begun(client, ids, request_id)
        claim(config, protocol=98)
        said = await perdure(made, "restart", "--all")
        assert "the code here has messages 98, state 1" in said
        claim(config)
        said = await perdure(made, "restart", "--all")  # refused by all at first, who speak another protocol
        assert "scheduler with messages 98" in said
        with trio.fail_after(DEADLINE_S):
            async with connected(made.places) as client, client.follow(request_id) as stream:
                assert (await stream.result()).ids == oracle(ids, TOKENS)
        await settled(made)


async def test_a_wrong_configuration_is_said_before_anything_stops(tmp_path: Path) -> None:
    config = tmp_path / "perdure.toml"
    claim(config)
    async with stack(PERDURE_CONFIG=str(config)) as made:
        before = {name: made.pid(name) for name in SERVICES}
        config.write_text("[supervise]\nhang = 1\n")
        await perdure(made, "restart", "--all", code=2)
        assert {name: made.pid(name) for name in SERVICES} == before
