"""`perdure generate` and `perdure chat` as processes, against real front services and a played scheduler."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from ops.cli import exits, main
from services.detokenizer.actor import Detokenizer
from services.tokenizer.actor import Tokenizer
from shared.config import Config, ModelConfig
from shared.messages.base import unpack_u32
from shared.messages.front import FinishReason
from shared.paths import Places
from shared.peers import wait_exit
from shared.testing import running
from tests.service.played_scheduler import PlayedScheduler

ID = "ab" * 16
CONFIG = Config(model=ModelConfig(source="toy:1"))
ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def stack(places: Places, answer: bytes | None = b"hello") -> AsyncIterator[PlayedScheduler]:
    async with (
        running(PlayedScheduler, places, CONFIG, journal={}) as played,
        running(Tokenizer, places, CONFIG),
        running(Detokenizer, places, CONFIG),
    ):
        played.answer_with = answer
        yield played


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "ops.cli", *words]


def environ(places: Places) -> dict[str, str]:
    return os.environ | {"PERDURE_HOME": str(places.home), "PYTHONPATH": str(ROOT)}


async def perdure(places: Places, *words: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    with trio.fail_after(60):
        done = await trio.run_process(
            command(*words),
            stdin=stdin,
            env=environ(places),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


INPUTS: list[tuple[tuple[str, ...], bytes, str]] = [
    (("hé you",), b"", "hé you"),
    (("--prompt", "hé"), b"", "hé"),
    ((), b"from stdin\n", "from stdin\n"),
    (("--ids", "104, 105"), b"", "hi"),
    (("--ids", "-"), b"[104 105]", "hi"),
    (("--system", "be kind", "hi"), b"", "system: be kind\nuser: hi\nassistant:"),
    (("--chat", "hi"), b"", "user: hi\nassistant:"),
]


async def test_every_kind_of_input_becomes_the_prompt(places: Places, tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(b"line\r\n\n end ")
    inputs = [*INPUTS, (("--file", str(path)), b"", path.read_bytes().decode())]
    async with stack(places) as played:

        async def one(n: int, words: tuple[str, ...], stdin: bytes) -> None:
            done = await perdure(places, "generate", *words, "--id", f"{n:032x}", stdin=stdin)
            assert done == (0, "hello\n", "")

        async with trio.open_nursery() as nursery:
            for n, (words, stdin, _) in enumerate(inputs):
                nursery.start_soon(one, n, words, stdin)
        for n, (_, _, prompt) in enumerate(inputs):
            ids = unpack_u32(played.journal[f"{n:032x}"].submit.ids)
            assert bytes(ids.tolist()) == prompt.encode()


async def test_json_is_one_object_with_exactly_the_promised_fields(places: Places) -> None:
    async with stack(places):
        code, out, _ = await perdure(places, "generate", "hi", "--json", "--id", ID, "-n", "4")
    assert code == 0
    assert json.loads(out) == {
        "id": ID,
        "choice": 0,
        "index": 0,
        "ids": list(b"hell"),
        "text": "hell",
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "cached_tokens": 0,
            "cached_by_tier": {"device": 0, "host": 0, "disk": 0},
        },
        "timing": {"queued_s": 0, "ttft_s": 0.5, "total_s": 1},
    }


async def test_json_lines_join_to_the_same_answer(places: Places) -> None:
    async with stack(places, None) as played, trio.open_nursery() as nursery:
        outputs: list[tuple[int, str, str]] = []

        async def run() -> None:
            outputs.append(await perdure(places, "generate", "hi", "--json", "--stream", "--id", ID))

        nursery.start_soon(run)
        while ID not in played.journal:
            await trio.lowlevel.checkpoint()
        for n in range(3):
            played.draw(ID, f"word {n} ".encode())
        played.end(ID)
    ((code, out, _),) = outputs
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert "".join(line["text"] for line in lines) == "word 0 word 1 word 2 "
    assert [line["index"] for line in lines] == [sum(len(x["ids"]) for x in lines[:n]) for n in range(len(lines))]
    assert ["finish_reason" in line for line in lines] == [False] * (len(lines) - 1) + [True]


async def test_a_refusal_is_exit_3_with_code_reason_and_numbers(places: Places) -> None:
    async with stack(places):
        code, out, err = await perdure(places, "generate", "hi", "-n", "0", "--json", "--id", ID)
        assert code == 3
        assert json.loads(out)["error"] == {
            "code": "bad_request",
            "reason": "max_tokens is 0; it must be at least 1",
            "numbers": {"max_tokens": 0},
        }
        assert "max_tokens is 0" in err
        assert (await perdure(places, "generate", "hi"))[0] == 0


async def test_x03_a_prompt_over_the_context_is_exit_3_before_any_output(places: Places) -> None:
    async with stack(places):
        code, out, err = await perdure(places, "generate", stdin=b"x" * 5000)
    assert (code, out) == (3, "")
    assert "prompt is 5,000 tokens; the model's context is 4,096" in err


@pytest.mark.parametrize(
    ("words", "stdin"),
    [
        (("a", "--ids", "1"), b""),
        (("--ids", "1,x"), b""),
        (("--ids", "-5"), b""),
        (("--ids", "1", "--chat"), b""),
        (("--file", "/does/not/exist"), b""),
        ((), b"\xff\xfe"),
        (("a", "--attach", ID), b""),
        (("a", "--no-such-option"), b""),
    ],
)
def test_wrong_usage_is_exit_2_and_no_trace(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], stdin: bytes
) -> None:
    monkeypatch.setattr(exits, "quiet_logs", lambda: None)  # it would outlive this test
    done = CliRunner().invoke(main, ["generate", *words], input=stdin)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Error:" in done.stderr
    assert "Traceback" not in done.stderr


async def test_without_a_stack_it_is_exit_4_at_once(places: Places) -> None:
    code, out, err = await perdure(places, "generate", "hi")
    assert (code, out) == (4, "")
    assert "no stack runs on" in err


async def test_how_a_request_ends_is_the_exit_code(places: Places) -> None:
    ends: dict[FinishReason, int] = {"deadline": 5, "error": 1, "stop": 0, "cancelled": 130}
    codes: dict[str, int] = {}
    async with stack(places, None) as played:

        async def one(reason: FinishReason) -> None:
            request_id = reason.encode().hex().ljust(32, "0")
            async with trio.open_nursery() as nursery:

                async def run() -> None:
                    codes[reason] = (await perdure(places, "generate", "x", "--id", request_id, "--deadline", "9"))[0]

                nursery.start_soon(run)
                while request_id not in played.journal:
                    await trio.lowlevel.checkpoint()
                assert played.journal[request_id].submit.deadline_s == 9.0
                played.end(request_id, reason)

        async with trio.open_nursery() as nursery:
            for reason in ends:
                nursery.start_soon(one, reason)
    assert codes == ends


async def test_ctrl_c_cancels_the_request_and_exits_130(places: Places) -> None:
    async with stack(places, None) as played:
        process = await trio.lowlevel.open_process(
            command("generate", "hi", "--id", ID), env=environ(places), stdout=subprocess.PIPE
        )
        while ID not in played.journal:
            await trio.lowlevel.checkpoint()
        played.draw(ID, b"first")
        assert process.stdout is not None
        with trio.fail_after(30):
            assert await process.stdout.receive_some() == b"first"
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130
        assert [cancel.id for cancel in played.cancels] == [ID]
        await process.stdout.aclose()


async def test_detached_prints_the_id_and_can_be_followed(places: Places) -> None:
    async with stack(places, None) as played:
        code, out, _ = await perdure(places, "generate", "hi", "--detached")
        assert (code, played.cancels) == (0, [])
        request_id = out.strip()
        assert played.journal[request_id].submit.detached
        played.draw(request_id, b"later")
        played.end(request_id)
        assert (await perdure(places, "generate", "--attach", request_id))[:2] == (0, "later\n")
        assert (await perdure(places, "generate", "--attach", request_id, "--from", "3"))[:2] == (0, "er\n")


async def test_sampling_flags_reach_the_scheduler(places: Places) -> None:
    flags = "-n 3 -t 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 7 --stop a --stop b --ignore-eos --no-store --no-read"
    async with stack(places) as played:
        assert (await perdure(places, "generate", "hi", *flags.split(), "--cache-salt", "s"))[0] == 0
        (entry,) = played.journal.values()
    submit, sample = entry.submit, entry.submit.sample
    assert (submit.max_tokens, submit.stop, submit.stop_ids, submit.no_store, submit.no_read) == (
        3,
        ("a", "b"),
        (),
        True,
        True,
    )
    assert (sample.temperature, sample.top_k, sample.top_p, sample.min_p, sample.seed) == (0.5, 4, 0.9, 0.1, 7)
    assert submit.salt != b""


async def test_a_chat_carries_its_turns_along(places: Places) -> None:
    async with stack(places) as played:
        said = b"first\n\nsecond\n/new\nthird\n"
        assert await perdure(places, "chat", "--system", "s", stdin=said) == (0, "hello\nhello\nhello\n", "")
        prompts = [bytes(unpack_u32(entry.submit.ids).tolist()).decode() for entry in played.journal.values()]
    one = "system: s\nuser: first\nassistant:"
    two = "system: s\nuser: first\nassistant: hello\nuser: second\nassistant:"
    assert prompts == [one, two, "system: s\nuser: third\nassistant:"]


async def test_a_turn_that_was_refused_is_not_part_of_the_chat(places: Places) -> None:
    async with stack(places) as played:
        code, out, err = await perdure(places, "chat", "--json", stdin=b"x" * 5000 + b"\nok\n")
        (entry,) = played.journal.values()
    assert code == 0
    assert [json.loads(line).get("error", {}).get("code") for line in out.splitlines()] == ["context_too_long", None]
    assert bytes(unpack_u32(entry.submit.ids).tolist()) == b"user: ok\nassistant:"
    assert "5,0" in err


class Terminal:
    """A command at a terminal: what it shows, what is typed."""

    def __init__(self, places: Places, *words: str) -> None:
        self._mine, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command(*words), env=environ(places), stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._mine, text.encode())

    async def wait_for(self, text: str) -> None:
        """Returns once `text` has been shown since the last wait."""
        with trio.fail_after(30):
            while text not in self.shown:
                await trio.lowlevel.wait_readable(self._mine)
                self.shown += os.read(self._mine, 4096).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    async def wait_exit(self) -> int:
        with trio.fail_after(30):
            await wait_exit(self.process.pid)
        os.close(self._mine)
        return self.process.wait()


async def test_at_a_terminal_ctrl_c_stops_the_answer_and_the_chat_goes_on(places: Places) -> None:
    async with stack(places, None) as played:
        terminal = Terminal(places, "chat")
        await terminal.wait_for("> ")
        terminal.type("tell me\n")
        while not played.journal:
            await trio.lowlevel.checkpoint()
        (request_id,) = played.journal
        played.draw(request_id, b"once \x1b[2J upon")
        await terminal.wait_for("once \ufffd[2J upon")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.wait_for("> ")
        assert [cancel.id for cancel in played.cancels] == [request_id]
        played.answer_with = b"fine"
        terminal.type("again\n")
        await terminal.wait_for("fine")
        await terminal.wait_for("new; first after")
        await terminal.wait_for("> ")
        last = list(played.journal.values())[-1]
        assert bytes(unpack_u32(last.submit.ids).tolist()) == b"user: again\nassistant:"  # the stopped turn is gone
        terminal.type("\x04")
        assert await terminal.wait_exit() == 0


async def test_at_a_terminal_ctrl_c_at_the_prompt_ends_the_chat(places: Places) -> None:
    async with stack(places):
        terminal = Terminal(places, "chat")
        await terminal.wait_for("> ")
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.wait_exit() == 130
