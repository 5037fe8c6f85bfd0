"""Clients over TCP against a real toy stack: the same promises as over ipc, and nobody else's requests."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from ops.cli import main
from ops.client import Client, KeyRefused, RequestRejected, Server, connected
from ops.stack import ROOT
from services.scheduler.ledger_rows import read_ledger
from shared.curve.keys import new_pair
from shared.messages.front import Sampling
from shared.paths import Places
from shared.testing import ended
from tests.e2e.kit import DEADLINE_S, TOY, Watched, ask, client_of, ledger_rows, oracle, prompt
from tests.front_kit import free_ports, give_key, take_key

TOKENS = 300


class Remote:
    """A stack with a front, and clients of it."""

    def __init__(self, made: Watched, port: int) -> None:
        self.made = made
        self.port = port

    def server(self, user: str) -> Server:
        """With a new key of that user."""
        return Server("127.0.0.1", self.port, give_key(self.made.places, user))

    @asynccontextmanager
    async def client(self, server: Server, tmp: Path) -> AsyncIterator[Client]:
        """A client that knows nothing of the stack's home."""
        elsewhere = Places(tmp / "elsewhere")
        with trio.fail_after(DEADLINE_S):
            async with connected(elsewhere, server=server, recovery_timeout_s=DEADLINE_S) as client:
                yield client


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    port = free_ports()
    with Watched(TOY | {"PERDURE_FRONT__TCP": f"127.0.0.1:{port}", "PERDURE_FRONT__USER_REQUESTS": "3"}) as made:
        made.places.make()
        give_key(made.places, "first")
        trio.run(made.start)
        yield Remote(made, port)
        assert not made.complaints()


def greedy(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


async def test_a_remote_answer_is_the_same_while_every_front_service_is_killed(remote: Remote, tmp_path: Path) -> None:
    ids = prompt(1, 100)
    async with remote.client(remote.server("alice"), tmp_path) as client:
        async with client.generate(ids=ids, sampling=greedy(TOKENS)) as stream:
            got: list[int] = []
            first = await anext(stream)
            for service in ("tokenizer", "detokenizer", "scheduler", "worker"):
                remote.made.kill(service)
                await remote.made.wait_serving()
            rest = await stream.result()
            got = [*memoryview(first.ids).cast("I"), *rest.ids]
        assert tuple(got) == oracle(ids, TOKENS)
    rows = await ledger_rows(remote.made, 1)
    assert {row["principal"] for row in rows if row["id"] == stream.id} == {"alice"}


async def test_a_tokenizer_killed_before_it_answers_is_asked_again_under_the_same_id(
    remote: Remote, tmp_path: Path
) -> None:
    ids = prompt(2, 60)
    async with remote.client(remote.server("alice"), tmp_path) as client:
        assert (await ask(client, ids[:8], 3)).ids == oracle(ids[:8], 3)
        pid = remote.made.kill("tokenizer", signal.SIGSTOP)
        async with client.generate(ids=ids, sampling=greedy(20)) as stream:
            await trio.lowlevel.checkpoint()
            os.kill(pid, signal.SIGKILL)
            result = await stream.result()
        assert result.ids == oracle(ids, 20)
    with trio.fail_after(DEADLINE_S):
        while True:
            rows = [row for row in read_ledger(remote.made.places.ledger, limit=1000) if row["id"] == stream.id]
            if rows:
                break
            await trio.sleep(0.05)  # the ledger follows behind
    assert len(rows) == 1


async def test_u3_another_users_request_can_be_neither_followed_nor_cancelled(remote: Remote, tmp_path: Path) -> None:
    ids = prompt(3, 40)
    async with (
        remote.client(remote.server("alice"), tmp_path) as hers,
        remote.client(remote.server("alice"), tmp_path) as hers_too,
        remote.client(remote.server("bob"), tmp_path) as his,
        client_of(remote.made) as local,
        hers.generate(ids=ids, sampling=greedy(TOKENS)) as stream,
    ):
        await stream.accepted()
        for stranger in (his, local):
            assert not await stranger.cancel(stream.id)
            with pytest.raises(RequestRejected, match="not_found"):
                async with stranger.follow(stream.id) as followed:
                    await followed.result()
        async with hers_too.follow(stream.id) as followed:  # the user owns it, with whatever key
            assert (await followed.result()).ids == oracle(ids, TOKENS)
        assert (await stream.result()).ids == oracle(ids, TOKENS)


async def test_u3_users_share_no_cached_block_and_a_new_key_finds_what_the_old_one_left(
    remote: Remote, tmp_path: Path
) -> None:
    ids = prompt(4, 200)
    cached = {}
    for name, user in (("first", "carol"), ("other", "dave"), ("rotated", "carol")):
        async with remote.client(remote.server(user), tmp_path) as client:
            result = await ask(client, ids, 2)
            assert result.ids == oracle(ids, 2)
            cached[name] = result.finish.usage.cached_tokens
    async with client_of(remote.made) as local:
        cached["local"] = (await ask(local, ids, 2)).finish.usage.cached_tokens
    assert cached["first"] == cached["other"] == cached["local"] == 0
    assert cached["rotated"] > 150


async def test_a_user_has_so_many_requests_and_others_are_served(remote: Remote, tmp_path: Path) -> None:
    async with (
        remote.client(remote.server("alice"), tmp_path) as hers,
        remote.client(remote.server("bob"), tmp_path) as his,
        hers.generate(ids=prompt(5, 40), sampling=greedy(4000)) as one,
        hers.generate(ids=prompt(6, 40), sampling=greedy(4000)) as two,
        hers.generate(ids=prompt(7, 40), sampling=greedy(4000)) as three,
    ):
        for stream in (one, two, three):
            await stream.accepted()
        with pytest.raises(RequestRejected) as caught:
            await ask(hers, prompt(8, 40), 3)
        assert caught.value.rejected.code == "overloaded"
        assert caught.value.rejected.numbers == {"requests": 3, "user_requests": 3}
        assert (await ask(his, prompt(8, 40), 3)).ids == oracle(prompt(8, 40), 3)


async def test_a_refused_key_ends_the_wait_at_once(remote: Remote, tmp_path: Path) -> None:
    server = remote.server("eve")
    take_key(remote.made.places, server.key)
    with pytest.raises(KeyRefused, match="not allowed"):
        async with remote.client(server, tmp_path) as client:
            await ask(client, [1, 2, 3], 3)


def command(*arguments: str, cwd: Path, **environ: str) -> "subprocess.Popen[bytes]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    clean |= {"PYTHONPATH": str(ROOT), "PERDURE_HOME": str(cwd / "no stack here")} | environ
    line = [sys.executable, "-m", "ops.cli", *arguments]
    return subprocess.Popen(line, cwd=cwd, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


async def said(process: "subprocess.Popen[bytes]") -> tuple[int, str, str]:
    with trio.fail_after(DEADLINE_S):
        code = await ended(process)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        return code, process.stdout.read().decode(), process.stderr.read().decode()


async def test_the_command_line_makes_a_key_uses_it_and_loses_it(remote: Remote, tmp_path: Path) -> None:
    at, home = f"tcp://127.0.0.1:{remote.port}", str(remote.made.places.home)
    code, out, err = await said(command("keys", "add", "fred", "--out", "fred.key", cwd=tmp_path, PERDURE_HOME=home))
    assert code == 0, err
    assert (tmp_path / "fred.key").stat().st_mode & 0o777 == 0o600
    asking = ("generate", "--ids", "1,2,3", "-n", "4", "-t", "0", "--json", "--connect", at, "--key", "fred.key")
    code, out, err = await said(command(*asking, cwd=tmp_path))
    assert code == 0, err
    assert tuple(json.loads(out)["ids"]) == oracle([1, 2, 3], 4)
    code, out, err = await said(command(*asking[:-4], cwd=tmp_path, PERDURE_CONNECT=at, PERDURE_KEY="fred.key"))
    assert tuple(json.loads(out)["ids"]) == oracle([1, 2, 3], 4)
    code, out, err = await said(command("keys", "remove", "fred", cwd=tmp_path, PERDURE_HOME=home))
    assert code == 0, err
    code, out, err = await said(command(*asking, cwd=tmp_path))
    assert (code, out) == (3, "")
    assert "not allowed" in err


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("--connect", "tcp://127.0.0.1:7101"), "--connect needs --key FILE"),
        (("--connect", "http://x", "--key", "good.key"), "is no address"),
        (("--connect", "tcp://127.0.0.1:7101", "--key", "none.key"), "there is no key file none.key"),
        (("--connect", "tcp://127.0.0.1:7101", "--key", "open.key"), "open to others"),
        (("--connect", "tcp://127.0.0.1:7101", "--key", "bad.key"), "is damaged"),
    ],
)
def test_a_wrong_address_or_key_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], wrong: str
) -> None:
    key = give_key(Places(tmp_path / "home"), "x")
    for name, text in (("good", key.secret), ("open", key.secret), ("bad", "short")):
        path = tmp_path / f"{name}.key"
        path.write_text(json.dumps({"user": "x", "public": new_pair().public, "secret": text, "server": key.server}))
        path.chmod(0o644 if name == "open" else 0o600)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["generate", "hi", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert wrong in result.stderr


def test_serve_refuses_tcp_without_keys_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    setting = {"PERDURE_HOME": "home", "PERDURE_MODEL__SOURCE": "toy:1", "PERDURE_FRONT__TCP": "127.0.0.1:7101"}
    result = CliRunner().invoke(main, ["serve"], env=setting)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "no client has a key; `perdure keys add USER` makes one" in result.stderr
    assert not (tmp_path / "home").exists()
