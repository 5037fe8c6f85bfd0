"""Prompts as a command line gives them: text, files, token ids, and chats made of them."""

import sys

import click

from ops.cli.sampling import text
from shared.messages.base import pack_u32
from shared.messages.front import ChatMessage


def chat_messages(prompt: str, system: str | None) -> tuple[ChatMessage, ...]:
    """A user's message, and a system message before it."""
    first = () if system is None else (ChatMessage(role="system", content=text(system)),)
    return (*first, ChatMessage(role="user", content=prompt))


def from_stdin() -> str:
    """All of it."""
    return decoded(sys.stdin.buffer.read(), "stdin")


def decoded(data: bytes, name: str) -> str:
    """UTF-8; UsageError says where it is none."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name} is no UTF-8: byte {data[error.start]:#04x} at offset {error.start}") from None


def parse_ids(listed: str) -> bytes:
    """Token ids separated by commas or blanks -> packed u32; UsageError names the one that is none."""
    words = listed.replace(",", " ").replace("[", " ").replace("]", " ").split()
    try:
        return pack_u32([int(word) for word in words])
    except (ValueError, OverflowError):
        wrong = next(word for word in words if not (word.isascii() and word.isdigit() and int(word) < 1 << 32))
        raise click.UsageError(f"{wrong!r} is no token id; write integers from 0, separated by commas") from None
