"""A stack on another machine: its one address, and the key that opens it."""

import re
from dataclasses import dataclass
from pathlib import Path

from shared.config import ConfigError
from shared.curve.door import PORTS
from shared.curve.keys import ClientKey, Remote, load_client_key

_URL = re.compile(r"(?:tcp://)?([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


@dataclass(frozen=True)
class Server:
    """`port` is the tokenizer's; the detokenizer has the one after it."""

    host: str
    port: int
    key: ClientKey

    @classmethod
    def at(cls, url: str, key_file: Path) -> "Server":
        """From what a user types: tcp://HOST:PORT and a key file; ConfigError for what is wrong with either."""
        match = _URL.fullmatch(url)
        if match is None or not 1 <= int(match.group(2)) <= 65534:
            raise ConfigError(f"{url!r} is no address; write tcp://HOST:PORT, with the port of the server's front.tcp")
        return cls(match.group(1), int(match.group(2)), load_client_key(key_file))

    def mailbox(self, role: str) -> Remote:
        """Where a front service listens."""
        return Remote(f"tcp://{self.host}:{self.port + PORTS[role]}", self.key)
