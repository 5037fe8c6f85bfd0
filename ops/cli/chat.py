"""`perdure chat`: a conversation; each turn sends all turns, and the cache makes the old ones cheap."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import trio

from ops.cli.answers import rejected_json, show, usage_line, write
from ops.cli.exits import INTERRUPTED, OK, REJECTED, plain_errors
from ops.cli.sampling import Wishes, sampling_options, text, wishes
from ops.cli.session import Interrupts, exit_code, remote_options, run_session, say
from ops.client import Client, RequestRejected, new_id
from shared.messages.front import ChatMessage, Generate

HELP = "Ctrl-C stops an answer, Ctrl-D ends the chat, /new begins another."


@click.command()
@click.option("--system", help="A system message before the first turn.")
@sampling_options
@remote_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a turn (with --stream: one a chunk).")
@click.option("--stream", "lines", is_flag=True, help="With --json: JSON lines.")
def chat(system: str | None, as_json: bool, lines: bool, connect: str | None, key: Path | None, **options: Any) -> None:
    """Talk with the model, turn by turn; each line of stdin is a turn when it is no terminal."""
    with plain_errors():
        conversation = Conversation(wishes(options), system, as_json=as_json, lines=lines)
        run_session(conversation.run, connect, key)


class Conversation:
    """All turns so far, and how the next is asked."""

    def __init__(self, wished: Wishes, system: str | None, *, as_json: bool, lines: bool) -> None:
        self._wished = wished
        self._opening = () if system is None else (ChatMessage(role="system", content=text(system)),)
        self._turns: tuple[ChatMessage, ...] = self._opening
        self._as_json = as_json
        self._lines = lines
        self._at_terminal = sys.stdin.isatty()

    async def run(self, client: Client, interrupts: Interrupts) -> int:
        """Until the input ends -> exit code: of a terminal's chat always 0, else of the last turn."""
        if self._at_terminal:
            say(HELP)
        code, session = OK, interrupts.scope
        while (said := await self._next_turn()) is not None:
            if said.strip() == "/new":
                self._turns = self._opening
                continue
            if not said.strip():
                continue
            with trio.CancelScope() as answer:
                interrupts.scope = answer
                code = await self._turn(client, said)
            interrupts.scope = session
            if answer.cancelled_caught:
                code = INTERRUPTED
                if not self._at_terminal:
                    return code
                await write("\n")
        return OK if self._at_terminal else code

    async def _next_turn(self) -> str | None:
        """A line that somebody typed, None at the end of the input."""

        def read() -> str:
            return input("> ") if self._at_terminal else sys.stdin.readline()

        try:
            line = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
        except EOFError:
            await write("\n")
            return None
        except UnicodeDecodeError as error:
            raise click.UsageError(f"stdin is no UTF-8: {error.reason}") from None
        return text(line.rstrip("\n")) if line or self._at_terminal else None

    async def _turn(self, client: Client, said: str) -> int:
        """Asks with all turns, shows the answer, and keeps both; a failed turn is not kept."""
        asked = (*self._turns, ChatMessage(role="user", content=said))
        request = Generate(id=new_id(), messages=asked, **self._wished.fields())
        try:
            async with client.generate(request) as stream:
                finish, answer = await show(stream, as_json=self._as_json, lines=self._lines)
        except RequestRejected as refused:
            if self._as_json:
                await write(json.dumps(rejected_json(refused.rejected), ensure_ascii=False) + "\n")
            say(str(refused))
            return REJECTED
        if not self._as_json:
            await write("\n")
        if sys.stderr.isatty():
            say(usage_line(finish))
        if finish.reason in ("stop", "length"):
            self._turns = (*asked, ChatMessage(role="assistant", content=answer))
        return exit_code(finish)
