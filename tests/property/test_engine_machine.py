"""The whole scheduler engine under random arrivals, losses, restarts and delays, against a cache-off oracle.

`World` checks after every event: the engine's integrity and the pool's, that rows write only their own blocks and
stay in the budget, that output grows index by index and ends once. At the end everything is left alone: every
request must have ended with exactly the oracle's tokens, and no block, lease or grant may be left.
"""

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.settings import Settings
from tests.scheduler_world import VOCAB, World

stems = [[(7 * i + family) % VOCAB for i in range(200)] for family in range(3)]


class EngineMachine(RuleBasedStateMachine):
    """Rules are what the world can do to the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World

    @initialize(
        block_tokens=st.sampled_from([1, 2, 4, 16]),
        blocks=st.integers(2, 24),
        step_tokens=st.integers(1, 24),
        max_running=st.integers(1, 6),
        policy=st.sampled_from(["fcfs", "lpm"]),
        retract_every=st.sampled_from([0, 0, 1, 3]),
        prefix_cache=st.sampled_from([True, True, True, False]),
        max_bypass=st.sampled_from([1, 4]),
        store=st.booleans(),
        host_slots=st.sampled_from([3, 1000]),
    )
    def begin(self, block_tokens, blocks, step_tokens, max_running, store, host_slots, **options) -> None:
        settings = Settings(
            step_tokens=step_tokens, max_running=max_running, max_waiting=12, save_batch=4, max_saving=8, **options
        )
        self.world = World(settings, blocks=blocks, block_tokens=block_tokens, max_context=60)
        self.world.store.capacity = host_slots
        if store:
            self.world.start_store()

    # --- clients

    @rule(
        family=st.integers(0, 2),
        shared=st.floats(0, 1),
        length=st.integers(1, 60),
        tail=st.integers(0, 5),
        max_tokens=st.sampled_from([1, 2, 5, 30]),
        seed=st.sampled_from([None, 0, 1]),
        stop_ids=st.sampled_from([(), (3,), (1, 2, 3, 4)]),
        logprobs=st.sampled_from([-1, 0]),
        flags=st.sampled_from(["", "", "", "no_store", "no_read", "both", "salt"]),
        deadline_s=st.sampled_from([None, None, 0.2, 5.0]),
    )
    def submit(self, family, shared, length, tail, max_tokens, seed, stop_ids, logprobs, flags, deadline_s) -> None:
        keep = int(shared * length)
        prompt = stems[family][:keep] + [(tail + i) % VOCAB for i in range(length - keep)]
        self.world.submit(
            prompt,
            max_tokens,
            seed=seed,
            stop_ids=stop_ids,
            logprobs=logprobs,
            no_store=flags in ("no_store", "both"),
            no_read=flags in ("no_read", "both"),
            salt=b"salt" if flags == "salt" else b"",
            deadline_s=deadline_s,
        )

    @precondition(lambda self: self.world.sent)
    @rule(index=st.integers(0, 1000), twice=st.booleans())
    def cancel(self, index, twice) -> None:
        id = sorted(self.world.sent)[index % len(self.world.sent)]
        self.world.cancel(id)
        if twice:
            assert not self.world.cancel(id)

    @precondition(lambda self: any(sent.tokens for sent in self.world.sent.values()))
    @rule(index=st.integers(0, 1000), at=st.integers(1, 30))
    def stop(self, index, at) -> None:
        ids = sorted(id for id, sent in self.world.sent.items() if sent.tokens and id not in self.world.forgotten)
        if ids:
            id = ids[index % len(ids)]
            sent = self.world.sent[id]
            if sent.stop_at is None and (sent.finish is None or sent.finish.reason == "length"):
                self.world.stop_at(id, min(at, len(sent.tokens)))

    @precondition(lambda self: self.world.sent)
    @rule(index=st.integers(0, 1000))
    def send_again(self, index) -> None:
        ids = sorted(set(self.world.sent) - self.world.forgotten)
        if ids:
            message = self.world.sent[ids[index % len(ids)]].submit
            assert self.world.send(message, drawn=12345).known

    # --- worker

    @precondition(lambda self: self.world.plan)
    @rule()
    def finish_plan(self) -> None:
        self.world.finish_plan()

    @rule(count=st.integers(1, 8))
    def turns(self, count) -> None:
        for _ in range(count):
            self.world.turn()

    @precondition(lambda self: self.world.transfers)
    @rule(index=st.integers(0, 1000), ok=st.sampled_from([True, True, True, False]), early=st.booleans())
    def transfer(self, index, ok, early) -> None:
        index %= len(self.world.transfers)
        if early:
            self.world.copy_early(index)
        else:
            self.world.finish_transfer(index, ok=ok)

    @rule()
    def restart_worker(self) -> None:
        if self.world.worker is None:
            self.world.start_worker()
        else:
            self.world.kill_worker()

    @rule()
    def replace_worker(self) -> None:
        self.world.start_worker()

    # --- store

    @precondition(lambda self: self.world.asks)
    @rule(index=st.integers(0, 1000), how=st.sampled_from(["answered", "answered", "answered", "failed", "lost"]))
    def answer(self, index, how) -> None:
        index %= len(self.world.asks)
        if how == "lost":
            self.world.lose_ask(index)
        else:
            self.world.answer_ask(index, failed=how == "failed")

    @precondition(lambda self: self.world.store.staging and self.world.store_up)
    @rule(fail=st.sampled_from([False, False, False, True]))
    def stage(self, fail) -> None:
        self.world.stage(fail=fail)

    @rule(lose_arena=st.booleans(), answered=st.integers(0, 3))
    def restart_store(self, lose_arena, answered) -> None:
        if self.world.store_up:
            self.world.kill_store(lose_arena=lose_arena, answered=answered)
        else:
            self.world.start_store()

    @rule(index=st.integers(0, 1000), what=st.sampled_from(["spill", "spill", "lose", "corrupt", "mute", "speak"]))
    def disturb_store(self, index, what) -> None:
        store = self.world.store
        if what == "spill":
            store.spill()
        elif what == "lose":
            store.lose(index)
        elif what == "corrupt":
            store.corrupt(index)
        else:
            self.world.mute = what == "mute"

    @rule(answered=st.booleans())
    def clear(self, answered) -> None:
        self.world.clear(answered=answered)

    # --- scheduler and time

    @rule(lose_result=st.booleans())
    def restart_scheduler(self, lose_result) -> None:
        self.world.restart_scheduler(lose_result=lose_result)

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.5, 6.0, 700.0]))
    def advance(self, seconds) -> None:
        self.world.advance(seconds)

    @invariant()
    def bounded(self) -> None:
        now = self.world.engine.statistics()
        assert now.running <= self.world.settings.max_running
        assert now.loading <= self.world.settings.max_loads
        assert now.saving <= self.world.settings.max_saving

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if self.world.worker is None:
            self.world.start_worker()
        self.world.settle()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = hypothesis_settings(print_blob=True)
