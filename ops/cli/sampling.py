"""Options that `generate` and `chat` share: sampling, limits, cache, and the request that they make."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from shared.messages.front import Sampling

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Wishes:
    """What the shared options say; goes into each request of the command."""

    sampling: Sampling
    deadline_s: float | None
    detached: bool
    cache_salt: str | None
    no_store: bool
    no_read: bool

    def fields(self) -> dict[str, Any]:
        """Keyword arguments for Generate."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


_OPTIONS = (
    click.option(
        "-n", "--max-tokens", type=int, help="At most this many new tokens [default: what the context holds]."
    ),
    click.option("-t", "--temperature", type=float, help="0 is greedy [default: the model's own]."),
    click.option("--top-k", type=int, help="Draw from the k likeliest tokens; 0: off."),
    click.option("--top-p", type=float, help="Draw from the likeliest tokens that together reach p."),
    click.option("--min-p", type=float, help="Draw from tokens at least this fraction as likely as the likeliest."),
    click.option("--seed", type=int, help="Makes draws repeatable."),
    click.option("--stop", multiple=True, help="End before this text; may be given several times."),
    click.option("--ignore-eos", is_flag=True, help="Do not end at the model's end-of-text tokens."),
    click.option("--logprobs", type=int, help="Log-probabilities, of this many alternatives too (with --json)."),
    click.option("--deadline", type=float, help="End the request this many seconds after its acceptance."),
    click.option("--cache-salt", help="Share cached KV only with requests of the same salt."),
    click.option("--no-store", is_flag=True, help="Keep nothing of this request in the cache."),
    click.option("--no-read", is_flag=True, help="Use nothing from the cache for this request."),
)


def sampling_options(command: Command) -> Command:
    """Adds the options; the command takes their values as `**options` and hands them to `wishes`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def wishes(options: dict[str, Any]) -> Wishes:
    """The values of `sampling_options`; ranges are the tokenizer's business."""
    return Wishes(
        sampling=Sampling(
            max_tokens=options["max_tokens"],
            temperature=options["temperature"],
            top_k=options["top_k"],
            top_p=options["top_p"],
            min_p=options["min_p"],
            seed=options["seed"],
            stop=tuple(text(stop) for stop in options["stop"]),
            ignore_eos=options["ignore_eos"],
            logprobs=options["logprobs"],
        ),
        deadline_s=options["deadline"],
        detached=options.get("detached", False),
        cache_salt=None if options["cache_salt"] is None else text(options["cache_salt"]),
        no_store=options["no_store"],
        no_read=options["no_read"],
    )


def text(argument: str) -> str:
    """A command line argument as text: bytes that are no UTF-8 become U+FFFD instead of half-characters."""
    return os.fsencode(argument).decode("utf-8", "replace")
