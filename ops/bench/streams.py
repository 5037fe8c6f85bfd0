"""Eight and thirty-two streams: new tokens a second, against one at a time; what the services take beside the worker.

Prompts are distinct. A rate counts all new tokens from sending the requests to the last token, prompts' time included;
a second one counts only while all streams decode.
"""

from collections.abc import Callable

from ops.admin import SERVICES
from ops.bench.measure import Spread, cpu_s, timed, timelines
from ops.bench.peers.interface import decode_rate, whole_rate
from ops.client import connected
from ops.stack import Stack

STREAMS = (8, 32)
PROMPT, TOKENS = 128, 256
SHARE_AT = 8
"""Streams at which the services' share of a core is taken."""

Fresh = Callable[[int], list[int]]
Note = Callable[[str, Spread, Spread | None, float, str], None]


async def streams(stack: Stack, fresh: Fresh, note: Note, rounds: int) -> None:
    """All rates, in turn."""
    alone: list[float] = []
    whole: dict[int, list[float]] = {count: [] for count in STREAMS}
    decoding: dict[int, list[float]] = {count: [] for count in STREAMS}
    shares: dict[str, list[float]] = {service: [] for service in SERVICES}
    async with connected(stack.places) as client:
        await timed(client, fresh(64), 8)
        for _ in range(rounds):
            alone.append(TOKENS / (await timed(client, fresh(PROMPT), TOKENS)).total_s)
            for count in STREAMS:
                prompts = [fresh(PROMPT) for _ in range(count)]
                before = {service: cpu_s(stack, service) for service in SERVICES}
                found = await timelines(client, prompts, TOKENS)
                took = max(one.arrivals[-1] for one in found)
                whole[count].append(whole_rate(found))
                decoding[count].append(decode_rate(found))
                if count == SHARE_AT:
                    for service in SERVICES:
                        shares[service].append((cpu_s(stack, service) - before[service]) / took)
    one = Spread.of(alone)
    for count in STREAMS:
        ours = Spread.of(whole[count])
        bar = ">= 3" if count == SHARE_AT else "none"
        note(f"{count} streams against one at a time, tokens/s", ours, one, ours.median / one.median, bar)
        ours = Spread.of(decoding[count])
        note(f"{count} streams while all decode, tokens/s", ours, None, ours.median / one.median, "none")
    beside = [sum(each) for each in zip(*(shares[name] for name in SERVICES if name != "worker"), strict=True)]
    total = Spread.of(beside)
    note(f"all services beside the worker at {SHARE_AT} streams, share of a core", total, None, total.median, "<= 0.25")
    for service in SERVICES:
        share = Spread.of(shares[service])
        note(f"{service} at {SHARE_AT} streams, share of a core", share, None, share.median, "none: says which")
