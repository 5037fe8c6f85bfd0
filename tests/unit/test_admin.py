"""Asking services that are being killed."""

from typing import Any, cast

import pytest
import zmq

from ops.admin import SERVICES, serving, snapshots
from shared.messages.hello import Snapshot
from shared.node import Node
from shared.peers import Peer


def _full(frames: list[bytes]) -> None:
    raise zmq.Again


class FullLink:
    """A link to a service that was killed before it took anything in."""

    async def wait_up(self) -> Peer:
        return Peer(role="store", engine="e0", incarnation=1, pid=1, send_frames=_full)


class FullNode:
    def dial(self, role: str) -> FullLink:
        return FullLink()


async def test_a_service_whose_queue_is_full_counts_as_away() -> None:
    found = await snapshots(cast("Node", FullNode()))
    assert found == dict.fromkeys(SERVICES)


def snapshot(ready: bool = True, **data: Any) -> Snapshot:
    return Snapshot(role="x", engine="e0", incarnation=1, pid=1, ready=ready, uptime_s=1.0, data=data)


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, True),
        ({"store": None}, False),
        ({"worker": snapshot(ready=False)}, False),
        ({"scheduler": None}, False),
        ({"scheduler": snapshot(worker_ready=True, store_open=False)}, False),
        ({"scheduler": snapshot(worker_ready=False, store_open=True)}, False),
    ],
)
def test_a_stack_serves_once_all_are_ready_and_linked(changed: dict[str, Snapshot | None], wanted: bool) -> None:
    found: dict[str, Snapshot | None] = {role: snapshot() for role in SERVICES}
    found["scheduler"] = snapshot(worker_ready=True, store_open=True)
    assert serving(found | changed) is wanted
