"""What `perdure status` shows of the scheduler: plain values."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from services.scheduler.breaker import BreakerStatistics

if TYPE_CHECKING:
    from services.scheduler.actor import Scheduler

TIERS = ("device", "host", "disk")


def _note(keeps: bool, breaker: BreakerStatistics) -> str:
    if not keeps:
        return "a benchmark: nothing is journaled or saved, no request survives"
    if breaker.state != "open":
        return ""
    return f"the store did not answer in time {breaker.strikes} times in a row: nobody waits for it until it does"


def picture(shell: "Scheduler") -> dict[str, Any]:
    """Keys: `worker_ready`, `store_open`, `store` (breaker, timeouts in a row, measured rate), `model`, `block_tokens`
    (also the shortest prefix that can be shared), `block_bytes`, `requests` (waiting, running, loading, retained, ...),
    `pool` (blocks: total, free, cached, locked, ...), `hits` (prompt tokens, of them from each tier, their share),
    `journal`, `ledger`, `feed`, `counters`; `note` in trouble.
    """
    now = shell.core.statistics()
    counters, facts = now.counters, shell.worker.facts
    cached = {tier: counters[f"cached_{tier}"] for tier in TIERS}
    prompt = counters["prompt_tokens"]
    queues = ("waiting", "running", "loading", "leaving", "retained", "in_flight", "saving")
    return {
        "note": shell.durable.reason or shell.durable.ledger.reason or _note(shell.durable.keeps, now.breaker),
        "worker_ready": shell.worker.ready,
        "store_open": shell.store.opened,
        "store": {
            "breaker": now.breaker.state,
            "timeouts_in_a_row": now.breaker.strikes,
            "load_block_s": round(now.load_block_s, 6),
        },
        "model": shell.worker.model,
        "block_tokens": facts.block_tokens if facts else 0,
        "block_bytes": facts.block_bytes if facts else 0,
        "epoch": now.epoch,
        "requests": {name: getattr(now, name) for name in queues},
        "pool": asdict(now.kv) if now.kv else {},
        "hits": {
            "prompt_tokens": prompt,
            **cached,
            "share": round(sum(cached.values()) / prompt, 4) if prompt else 0.0,
        },
        "journal": shell.durable.journal.statistics()
        | {"slowest_write_ms": round(1000 * shell.durable.slowest_write_s, 1)},
        "ledger": {"waiting": shell.durable.ledger.waiting, "lost": shell.durable.ledger.lost},
        "feed": {"connected": shell.feed.connected, "synced": shell.feed.synced, "due": shell.feed.due},
        "counters": counters,
    }
