"""What the engine counts (only ever upwards), and the frozen picture that it gives of itself."""

from dataclasses import dataclass, field, fields

from services.scheduler.breaker import BreakerStatistics
from services.scheduler.kv.manager import KVStatistics


@dataclass
class Counters:
    """Since the start of this life. `prompt_tokens` and `cached_*` are counted once a request, at its first admission:
    one that an earlier life accepted is admitted in this one, and would count with its hits alone.
    """

    accepted: int = 0
    rejected: int = 0
    no_read: int = 0
    """Accepted requests that wanted nothing from the cache: no lookup is made for them."""
    no_store: int = 0
    """Accepted requests of which nothing is kept, on any tier."""
    finished: dict[str, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "cancelled": 0, "deadline": 0, "error": 0}
    )
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    curtailed: int = 0
    """Times that plans of several steps were cut short for somebody who had come."""
    computed_tokens: int = 0
    cached_device: int = 0
    cached_host: int = 0
    cached_disk: int = 0
    retracted: int = 0
    retracted_by_force: int = 0
    stale_results: int = 0
    dropped_rows: int = 0
    """Rows of a result whose request was over: it had ended in the step before, or meanwhile."""
    outgrown: int = 0
    """Requests that ended because the pool holds no more tokens."""
    shared_waits: int = 0
    """Requests that waited for a prefix another one was computing or loading."""
    worker_losses: int = 0

    lookups: int = 0
    lookup_blocks: int = 0
    found_blocks: int = 0
    lookup_timeouts: int = 0
    lookups_unanswered: int = 0
    lookups_stale: int = 0
    """Answers of another clear epoch, or from before a clear."""
    loads: int = 0
    loaded_blocks: int = 0
    load_timeouts: int = 0
    load_blocks_missing: int = 0
    """Leased blocks that never arrived in the arena."""
    load_blocks_bad: int = 0
    """Blocks whose copy failed or whose checksum did not match."""
    loads_declined: int = 0
    """Prefixes that the store has and that were computed, as by what was measured that is quicker."""
    loads_beside: int = 0
    """Loads during which the front of the prefix was to be computed."""
    beside_tokens: int = 0
    """Tokens that were computed while the rest of their prefix was being loaded."""
    loads_without_room: int = 0
    loads_lethal: int = 0
    """Loads given up because the worker died in their copies again and again; what they read is not read again."""
    loads_dropped: int = 0
    """Loads whose request ended, was retracted, or whose cache was cleared."""
    leases_late: int = 0
    clears_heard: int = 0
    """Clears of somebody else, told by the store's epoch: the device forgot everything."""
    breaker_opened: int = 0
    waits_refused: int = 0
    """Lookups not made because the breaker was open."""

    save_offered: int = 0
    save_granted: int = 0
    save_have: int = 0
    save_full: int = 0
    save_stale: int = 0
    save_orphaned: int = 0
    """Blocks refused because the store had lost the block before them; their line is offered again."""
    save_committed: int = 0
    save_refused: int = 0
    save_failed: int = 0
    save_evicted: int = 0
    """Blocks gone from the device before they were saved."""
    save_abandoned: int = 0
    save_unanswered: int = 0
    save_retries: int = 0
    """How often unsaved blocks were offered again to a store that had not answered."""

    def count_loaded(self, tokens: tuple[int, int]) -> None:
        """Tokens from host and disk of a request that was in a step before they came."""
        host, disk = tokens
        self.cached_host += host
        self.cached_disk += disk

    def as_dict(self) -> dict[str, int]:
        """All of them by name; ends by reason as `finished_<reason>`."""
        counts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "finished"}
        return counts | {f"finished_{reason}": count for reason, count in self.finished.items()}


@dataclass(frozen=True)
class EngineStatistics:
    """The engine now. `kv` is None while there is no worker; the names in `counters` are those of Counters."""

    waiting: int
    running: int
    loading: int
    leaving: int
    """Ended requests whose blocks a plan that is out still uses."""
    retained: int
    in_flight: int
    """Rows of the outstanding plans."""
    saving: int
    epoch: int
    store: bool
    breaker: BreakerStatistics
    load_block_s: float
    """Measured seconds that a block takes from disk to arena; 0: unknown."""
    kv: KVStatistics | None
    counters: dict[str, int]
