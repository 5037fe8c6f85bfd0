"""Thirty kills of a real stack on the toy model. More: `make chaos`."""

import pytest
import trio

from ops.chaos.campaign import Campaign
from ops.chaos.models import toy
from ops.chaos.schedule import PAIRS, SERVICES
from ops.stack import Stack

KILLS, SEED = 30, 1
LIMIT_S = 1500.0
"""Against a hang only: on two idle cores it takes about a minute, on busy ones ten times as long."""


@pytest.mark.timeout(LIMIT_S + 60)
async def test_thirty_kills_lose_and_change_nothing() -> None:
    subject = toy()
    with Stack(subject.settings | {"PERDURE_SUPERVISE__HANG_S": str(subject.hang_s)}, share_models=False) as stack:
        campaign = Campaign(stack, subject, SEED, KILLS, 0.0, print)
        with trio.fail_after(LIMIT_S):
            await campaign.run()
        again = f"make chaos KILLS={KILLS} SEED={SEED}"
        assert not campaign.violations, f"{again}: {[str(one) for one in campaign.violations]}\n{stack.log_tail(60)}"
    assert campaign.tally.kills == KILLS
    for target in (*SERVICES, *("+".join(pair) for pair in PAIRS)):
        assert campaign.tally.strikes[target] >= 1, target
    assert campaign.totals.accepted >= 20
    assert campaign.totals.replayed == campaign.totals.accepted
