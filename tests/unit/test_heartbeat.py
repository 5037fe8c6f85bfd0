"""The heartbeat that the supervisor reads."""

import os

import trio

from shared.actor import Actor


async def test_a_heartbeat_that_nobody_reads_any_more_ends_without_an_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with trio.fail_after(5):
        await Actor._heartbeat(Actor.__new__(Actor), write)
    os.close(write)
