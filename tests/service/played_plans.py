"""The scheduler's side of the worker protocol, played by hand: plans, copies, epochs, with a file as the arena."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from shared.arena_key import NONCE_AT, NONCE_BYTES, arena_key
from shared.messages.base import pack_u32, unpack_u64
from shared.messages.engine import (
    Copy,
    Idle,
    Plan,
    Quiesce,
    Result,
    Row,
    SampleSpec,
    Transfer,
    Transferred,
    WorkerReady,
)
from shared.paths import Places
from shared.peers import Peer
from shared.testing import TestMailbox, mailbox_of

GREEDY = SampleSpec()
FRONT = 4096
"""Where the payloads of a played arena begin."""
Scheduler = mailbox_of("scheduler", frozenset({"worker"}))


class Playing:
    """The scheduler's side of one worker: plans and transfers with their numbers, answers in order."""

    def __init__(self, mailbox: TestMailbox, peer: Peer, ready: WorkerReady, arena: Path) -> None:
        self.mailbox = mailbox
        self.peer = peer
        self.ready = ready
        self.arena = arena
        self.epoch = 0
        self.seq = 0
        self.requests = 1000

    async def quiesce(self, epoch: int) -> None:
        self.epoch = epoch
        idle = await self.peer.ask(Quiesce(epoch=epoch), Idle, deadline_s=10)
        assert idle.epoch == epoch

    def plan(self, *rows: Row, epoch: int | None = None) -> int:
        self.seq += 1
        self.peer.send(Plan(epoch=self.epoch if epoch is None else epoch, seq=self.seq, rows=rows))
        return self.seq

    async def result(self) -> Result:
        _, _, message = await self.mailbox.receive(Result)
        assert isinstance(message, Result)
        return message

    async def step(self, *rows: Row) -> list[int]:
        seq = self.plan(*rows)
        result = await self.result()
        assert (result.epoch, result.seq) == (self.epoch, seq)
        assert [r.error for r in result.rows] == [None] * len(rows)
        return [r.token for r in result.rows]

    async def generate(
        self,
        prompt: list[int],
        n: int,
        blocks: list[int],
        *,
        chunk: int,
        cached: int = 0,
        sample: SampleSpec = GREEDY,
    ) -> list[int]:
        """Prefill from position `cached` in chunks, then decode one by one -> n ids."""
        self.requests += 1
        key, out = self.requests, list[int]()
        start = cached
        while start < len(prompt):
            ids = prompt[start : start + chunk]
            last = start + len(ids) == len(prompt)
            (token,) = await self.step(row(key, start, ids, blocks, sample if last else None))
            assert (token == -1) != last
            start += len(ids)
        out.append(token)
        while len(out) < n:
            (token,) = await self.step(row(key, len(prompt) + len(out) - 1, out[-1:], blocks, sample))
            out.append(token)
        return out

    async def generate_ahead(
        self, prompt: list[int], n: int, blocks: list[int], *, stop_ids: tuple[int, ...] = ()
    ) -> tuple[list[int], int]:
        """The same with one plan always behind the one that runs -> ids up to a stop id, and how many were dropped."""
        self.requests += 1
        first = msgspec.structs.replace(row(self.requests, 0, prompt, blocks), stop_ids=stop_ids)
        self.plan(first)
        out, dropped, sent = list[int](), 0, 1
        for _ in range(n):
            if sent < n:
                more = msgspec.structs.replace(
                    first, start=len(prompt) + sent - 1, ids=b"", drawn=sent, feeds_last=True
                )
                self.plan(more)
                sent += 1
            (result,) = (await self.result()).rows
            assert result.error is None
            dropped += result.dropped
            out += [] if result.dropped else [result.token]
        return out, dropped

    def transfer(self, save: bool, *copies: Copy, epoch: int | None = None, key: str = "") -> int:
        """Sends copies, whose offsets count from the first payload on."""
        self.seq += 1
        epoch = self.epoch if epoch is None else epoch
        arena, key = str(self.arena), key or key_of(self.arena)
        copies = tuple(msgspec.structs.replace(copy, offset=FRONT + copy.offset) for copy in copies)
        self.peer.send(Transfer(epoch=epoch, seq=self.seq, save=save, arena=arena, arena_key=key, copies=copies))
        return self.seq

    async def copied(self, save: bool, *copies: Copy, key: str = "") -> tuple[list[int], list[int]]:
        """Runs the copies -> (ok, checksums)."""
        seq = self.transfer(save, *copies, key=key)
        _, _, done = await self.mailbox.receive(Transferred)
        assert (done.epoch, done.seq) == (self.epoch, seq)
        return list(done.ok), list(unpack_u64(done.checksums))


def row(key: int, start: int, ids: list[int], blocks: list[int], sample: SampleSpec | None = GREEDY) -> Row:
    return Row(key, start, pack_u32(ids), pack_u32(blocks), sample)


async def meet(mailbox: TestMailbox, arena: Path, epoch: int) -> Playing:
    """Receives WorkerReady and quiesces, as a new scheduler does."""
    peer, _, ready = await mailbox.receive(WorkerReady)
    playing = Playing(mailbox, peer, ready, arena)
    await playing.quiesce(epoch)
    return playing


def make_arena(path: Path, nbytes: int) -> Path:
    """As far as a worker knows one: a page with a nonce, then `nbytes` of payloads."""
    path.write_bytes(bytes(NONCE_AT) + os.urandom(NONCE_BYTES) + bytes(FRONT - NONCE_AT - NONCE_BYTES + nbytes))
    path.chmod(0o600)
    return path


def key_of(path: Path) -> str:
    """What the store would call this very file; "" for none."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    try:
        return arena_key(fd)
    finally:
        os.close(fd)


def launch(places: Places, **settings: str) -> "subprocess.Popen[bytes]":
    """A worker as a process of its own; the caller kills and waits for it."""
    environ = os.environ | {"PERDURE_HOME": str(places.home)} | settings
    return subprocess.Popen([sys.executable, "-m", "services.worker"], env=environ)
