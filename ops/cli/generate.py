"""`perdure generate`: one request, shown while it is answered."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from ops.cli.answers import rejected_json, show, usage_line, write
from ops.cli.exits import DEADLINE, OK, REJECTED, plain_errors
from ops.cli.inputs import chat_messages, decoded, from_stdin, parse_ids
from ops.cli.sampling import sampling_options, text, wishes
from ops.cli.session import Interrupts, exit_code, remote_options, run_session, say
from ops.client import Client, RequestRejected, new_id
from shared.messages.front import Generate


@click.command()
@click.argument("prompt", required=False)
@click.option("--prompt", "prompt_option", help="The prompt; the same as the argument.")
@click.option(
    "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Read the prompt from a file."
)
@click.option("--ids", help="Token ids instead of text, separated by commas or blanks; - reads them from stdin.")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message through the model's chat template.")
@click.option("--system", help="A system message before it (implies --chat).")
@sampling_options
@remote_options
@click.option("--detached", is_flag=True, help="Print the id at once and let the request go on; see --attach.")
@click.option("--id", "request_id", help="The request's id, 32 or more hex digits [default: drawn].")
@click.option("--attach", metavar="ID", help="Follow a request that was submitted before, instead of a new one.")
@click.option("--from", "start", type=click.IntRange(min=0), default=0, help="With --attach: from this token on.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (with --stream: one a line, as it comes).")
@click.option("--stream", "lines", is_flag=True, help="With --json: JSON lines.")
def generate(
    prompt: str | None,
    prompt_option: str | None,
    file: Path | None,
    ids: str | None,
    chat: bool,
    system: str | None,
    request_id: str | None,
    attach: str | None,
    start: int,
    as_json: bool,
    lines: bool,
    connect: str | None,
    key: Path | None,
    **options: Any,
) -> None:
    """Answer a prompt: the argument, --prompt, --file, --ids, or stdin, exactly as it comes.

    Ctrl-C cancels the request. While a service is away the command says for whom it waits, and goes on afterwards.
    """
    with plain_errors():
        wished = wishes(options)
        if attach is not None:
            if any(given is not None for given in (prompt, prompt_option, file, ids, system)):
                raise click.UsageError("--attach follows a request that exists; give no prompt with it")
            request = Generate(id=attach, detached=True)
        else:
            source = _input(prompt, prompt_option, file, ids)
            if (chat or system is not None) and "prompt" in source:
                source = {"messages": chat_messages(source["prompt"], system)}
            elif chat or system is not None:
                raise click.UsageError("--chat and --system need text, not ids")
            request = Generate(id=request_id or new_id(), **source, **wished.fields())

        async def work(client: Client, interrupts: Interrupts) -> int:
            stream = client.follow(request.id, start=start) if attach is not None else client.generate(request)
            try:
                async with stream:
                    if wished.detached and attach is None:
                        await stream.accepted()
                        await write(json.dumps({"id": request.id}) + "\n" if as_json else f"{request.id}\n")
                        return OK
                    finish, _ = await show(stream, as_json=as_json, lines=lines)
            except RequestRejected as refused:
                if as_json:
                    await write(json.dumps(rejected_json(refused.rejected), ensure_ascii=False) + "\n")
                say(str(refused))
                return DEADLINE if refused.rejected.code == "deadline" else REJECTED
            if not as_json:
                await write("\n")
            if sys.stderr.isatty():
                say(usage_line(finish))
            return exit_code(finish)

        run_session(work, connect, key)


def _input(prompt: str | None, prompt_option: str | None, file: Path | None, ids: str | None) -> dict[str, Any]:
    """Exactly one source of input -> `prompt` or `ids` of Generate; UsageError otherwise."""
    named = {"PROMPT": prompt, "--prompt": prompt_option, "--file": file, "--ids": ids}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"give one input, not {' and '.join(given)}")
    if ids is not None:
        return {"ids": parse_ids(from_stdin() if ids == "-" else ids)}
    if file is not None:
        return {"prompt": decoded(file.read_bytes(), str(file))}
    said = prompt if prompt is not None else prompt_option
    if said is not None and said != "-":
        return {"prompt": text(said)}
    if said is None and sys.stdin.isatty():
        raise click.UsageError("give a prompt: as an argument, by --prompt, --file or --ids, or on stdin")
    return {"prompt": from_stdin()}
