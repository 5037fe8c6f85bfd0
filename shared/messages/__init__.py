"""Every message that crosses a socket, one file per conversation, and the codec.

`decode` turns two frames into (Head, Message) or raises BadMessage, whatever the bytes are.
"""

from typing import Any

import msgspec

from shared.messages import admin, engine, front, hello, store
from shared.messages.base import PROTOCOL, Head, Message

MAX_FRAME = 64 * 1024 * 1024
"""Bytes; a larger frame is refused by the socket before it is read."""


class BadMessage(ValueError):
    """The frames are no message of this protocol; the text says where and why."""


def _all_messages() -> list[type[Message]]:
    found: list[type[Message]] = []
    for module in (hello, admin, front, engine, store):
        for value in vars(module).values():
            is_message = isinstance(value, type) and issubclass(value, Message) and value is not Message
            if is_message and value.__module__ == module.__name__:
                found.append(value)
    return found


MESSAGES: tuple[type[Message], ...] = tuple(_all_messages())
_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgspec.msgpack.Decoder(Head)
_union: Any = MESSAGES[0]
for _kind in MESSAGES[1:]:
    _union = _union | _kind
_body_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(_union)
FrontMessage = (
    hello.Hello
    | hello.Bye
    | hello.Ping
    | hello.Pong
    | front.Generate
    | front.Cancel
    | front.WhoIsAway
    | front.Attach
    | front.Credit
)
"""All that a client sends. A stranger's bytes are decoded as nothing else: among the others are some of any depth."""
_front_decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(FrontMessage)


def encode(head: Head, message: Message) -> list[bytes]:
    """(Head, Message) -> the two frames of an envelope."""
    return [_encoder.encode(head), _encoder.encode(message)]


def decode(frames: list[bytes], *, from_stranger: bool = False) -> tuple[Head, Message]:
    """The two frames of an envelope -> (Head, Message), a FrontMessage if `from_stranger`; BadMessage otherwise."""
    if len(frames) != 2:
        raise BadMessage(f"an envelope has 2 frames, this one {len(frames)}")
    try:
        body = _front_decoder if from_stranger else _body_decoder
        return _head_decoder.decode(frames[0]), body.decode(frames[1])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(str(error)) from error


__all__ = ["MAX_FRAME", "MESSAGES", "PROTOCOL", "BadMessage", "Head", "Message", "decode", "encode"]
