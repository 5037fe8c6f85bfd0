"""What the engine may be told: limits, policy, waits."""

from dataclasses import dataclass
from typing import Literal, get_args

from shared.config import Config

Policy = Literal["fcfs", "lpm"]
Prefetch = Literal["timeout"]
Restore = Literal["auto", "load", "both"]


@dataclass(frozen=True)
class Settings:
    """Options of the engine; the first group comes from perdure.toml, the second is fixed by design.

    `restore`: how a prefix that the store has comes to be, see `restore.policy`.
    `plans_out`: how many plans the worker may have, 1 or 2; with 2, the next is made while one runs. `burst_s`:
    seconds that the steps of one plan may take; 0: each plan is for one step.
    `max_bypass`: a waiting request that so many younger ones overtook is served before any other. `scan`: how many
    waiting requests one step looks at. `max_loads`: requests that wait on the store at the same time. `store_s`:
    patience with Reserve and Commit, which hold nobody up. `save_batch`: blocks a Reserve, and so of one Transfer.
    `max_saving`: blocks between Reserve and Commit: a bound on what a slow store can pin, and on the copies that a
    load may find before it in the worker's queue (at 1 MB a block some ten milliseconds).
    """

    policy: Policy = "fcfs"
    prefetch: Prefetch = "timeout"
    restore: Restore = "load"
    step_tokens: int = 256
    max_running: int = 64
    max_waiting: int = 4096
    user_requests: int = 64
    result_ttl_s: float = 600.0
    max_retained: int = 4096
    lookup_s: float = 0.05
    load_s: float = 5.0
    prefix_cache: bool = True
    retract_every: int = 0
    saves: bool = True
    plans_out: int = 2
    burst_s: float = 0.0

    max_bypass: int = 32
    scan: int = 64
    max_loads: int = 16
    store_s: float = 5.0
    save_batch: int = 16
    max_saving: int = 64

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise ValueError(f"scheduler.policy is {self.policy!r}; known are {', '.join(get_args(Policy))}")
        if self.user_requests < 1:
            raise ValueError(f"front.user_requests is {self.user_requests}; at least 1 is needed")
        if self.prefetch not in get_args(Prefetch):
            raise ValueError(f"scheduler.prefetch is {self.prefetch!r}; known so far: {', '.join(get_args(Prefetch))}")
        if self.restore not in get_args(Restore):
            raise ValueError(f"scheduler.restore is {self.restore!r}; known are {', '.join(get_args(Restore))}")
        if self.plans_out not in (1, 2):
            raise ValueError(f"scheduler.plans_out is {self.plans_out}; write 1 or 2")
        if not self.burst_s >= 0:
            raise ValueError(f"scheduler.burst_s is {self.burst_s}; at least 0 is needed")
        for name in ("step_tokens", "max_running", "max_waiting", "max_retained"):
            if getattr(self, name) < 1:
                raise ValueError(f"scheduler.{name} is {getattr(self, name)}; at least 1 is needed")

    @classmethod
    def of(cls, config: Config) -> "Settings":
        """Those of a configuration; ValueError names a key with a wrong value."""
        options = config.scheduler
        return cls(
            policy=options.policy,  # type: ignore[arg-type]  # checked above
            prefetch=options.prefetch,  # type: ignore[arg-type]  # checked above
            restore=options.restore,  # type: ignore[arg-type]  # checked above
            step_tokens=options.step_tokens,
            max_running=options.max_running,
            max_waiting=options.max_waiting,
            user_requests=config.front.user_requests,
            result_ttl_s=options.result_ttl_s,
            max_retained=options.max_retained,
            lookup_s=options.lookup_s,
            load_s=options.load_s,
            prefix_cache=config.kv.prefix_cache,
            retract_every=config.faults.retract_every,
            saves=config.bench.durable,
            plans_out=options.plans_out,
            burst_s=options.burst_s,
        )
