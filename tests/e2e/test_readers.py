"""P16 and P31 on a real stack, in short; `make readers` runs them for a minute and 200 requests."""

import trio

from ops.bench.readers import LEDGER_READERS, soak
from tests.e2e.kit import stack


async def test_p16_p31_readers_of_index_and_ledger_and_a_lock_cost_no_request_and_no_row() -> None:
    async with stack() as made:
        with trio.fail_after(120):
            outcome = await soak(made, seconds=0.0, requests=20, lock_s=1.0)
        assert outcome.wrong == []
        assert outcome.rows == outcome.requests >= 20
        assert outcome.doctors >= 1
        assert outcome.lists >= LEDGER_READERS
