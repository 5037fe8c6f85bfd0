"""The whole scheduler engine under random arrivals, losses, restarts and delays, against a cache-off oracle.

`World` checks after every event: the engine's integrity and the pool's, that rows write only their own blocks and
stay in the budget, that output grows index by index and ends once. At the end everything is left alone: every
request must have ended with exactly the oracle's tokens, and no block, lease or grant may be left.
"""

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.settings import Settings
from tests.scheduler_world import World
from tests.sim_worker import VOCAB

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
        plans_out=st.sampled_from([1, 2, 2, 2]),
        burst_s=st.sampled_from([0.0, 0.03, 0.03]),
        steps_left=st.sampled_from([1, 3, 8]),
        store=st.sampled_from([True, True, False]),
        host_slots=st.sampled_from([3, 1000]),
        window=st.sampled_from([1, 3, 1000]),
        restore=st.sampled_from(["auto", "load", "both", "both"]),
    )
    def begin(
        self, block_tokens, blocks, step_tokens, max_running, steps_left, store, host_slots, window, **options
    ) -> None:
        settings = Settings(
            step_tokens=step_tokens, max_running=max_running, max_waiting=20, save_batch=8, max_saving=16, **options
        )
        self.world = World(settings, blocks=blocks, block_tokens=block_tokens, max_context=60)
        self.world.steps_left = steps_left
        self.world.store.capacity, self.world.store.window = host_slots, window
        if store:
            self.world.start_store()

    # --- clients

    @rule(
        family=st.integers(0, 2),
        shared=st.sampled_from([0.0, 0.6, 1.0, 1.0]),
        share_of_pool=st.sampled_from([0.1, 0.3, 0.5, 0.5, 1.0, 1.1]),
        tail=st.integers(0, 3),
        count=st.sampled_from([1, 1, 2, 4]),
        max_tokens=st.sampled_from([1, 2, 5, 30]),
        seed=st.sampled_from([0, 0, 1, None]),
        stop_ids=st.sampled_from([(), (3,), (1, 2, 3, 4)]),
        logprobs=st.sampled_from([-1, 0]),
        flags=st.sampled_from(["", "", "", "", "", "no_store", "no_read", "both", "salt"]),
        deadline_s=st.sampled_from([None, None, None, 0.2, 5.0]),
    )
    def submit(
        self, family, shared, share_of_pool, tail, count, max_tokens, seed, stop_ids, logprobs, flags, deadline_s
    ) -> None:
        facts = self.world.facts
        length = max(1, int(share_of_pool * min(facts.blocks * facts.block_tokens, self.world.max_context - 1)))
        keep = int(shared * length)
        prompt = stems[family][:keep] + [(tail + i) % VOCAB for i in range(length - keep)]
        for _ in range(count):
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

    @rule(count=st.sampled_from([1, 3, 10, 40, 40]))
    def turns(self, count) -> None:
        for _ in range(count):
            self.world.turn()

    @precondition(lambda self: self.world.outstanding())
    @rule(
        what=st.sampled_from(
            [
                *("plan", "plan", "run ahead", "copy", "copy", "copy early", "bad copy"),
                *("answer", "fail", "lose", "lose reply", "stage"),
            ]
        ),
        index=st.integers(0, 1000),
        how=st.booleans(),
    )
    def one_thing(self, what, index, how) -> None:
        """A single answer arrives, out of order; or never."""
        world = self.world
        if what == "plan" and world.plan is not None:
            world.finish_plan()
        elif what == "run ahead" and world.plans:
            world.run_ahead()
        elif what in ("copy", "bad copy") and world.transfers:
            world.finish_transfer(index % len(world.transfers), ok=what == "copy")
        elif what == "copy early" and world.transfers:
            world.copy_early(index % len(world.transfers))
        elif what in ("answer", "fail") and world.asks and not world.stopped:
            world.answer_ask(index % len(world.asks), failed=what == "fail")
        elif what == "lose" and world.asks:
            world.lose_ask(index % len(world.asks))
        elif what == "lose reply" and world.asks and not world.stopped:
            world.lose_reply(index % len(world.asks))
        elif what == "stage" and world.store.staging and not world.stopped:
            world.stage(fail=how)

    @precondition(lambda self: self.world.sent)
    @rule(
        how=st.sampled_from(["", "spill", "spill", "corrupt", "lose", "mute", "stop", "stall"]),
        index=st.integers(0, 1000),
    )
    def empty_the_pool(self, how, index) -> None:
        """What is cached can only come back from the store."""
        for _ in range(30):
            self.world.turn()
        if how == "mute":
            self.world.mute = True
        elif how == "stall":
            self.world.store.spill()
            self.world.stalled = True
        elif how == "stop":
            if self.world.store_up:
                self.world.stop_store()
        elif how:
            getattr(self.world.store, how)(*([index] if how != "spill" else []))
        self.world.start_worker()

    @rule(
        what=st.sampled_from(
            [
                *("kill worker", "kill store", "kill scheduler", "clear", "spill", "lose", "corrupt"),
                *("mute", "speak", "stop", "continue", "stall", "deliver"),
            ]
        ),
        index=st.integers(0, 1000),
        how=st.booleans(),
    )
    def disturb(self, what, index, how) -> None:
        world = self.world
        if what == "kill worker" and world.worker is not None:
            world.kill_worker()
        elif what == "kill store" and world.store_up:
            world.kill_store(lose_arena=how, answered=index % 4)
        elif what == "kill scheduler":
            world.restart_scheduler(lose_result=how)
        elif what == "clear":
            if world.clearing:
                world.end_clear(answered=how)
            else:
                world.begin_clear()
        elif what == "spill":
            world.store.spill()
        elif what == "lose":
            world.store.lose(index)
        elif what == "corrupt":
            world.store.corrupt(index)
        elif what in ("mute", "speak"):
            world.mute = what == "mute"
        elif what in ("stall", "deliver"):
            world.stalled = what == "stall"
        elif what == "stop" and world.store_up:
            world.stop_store()
        elif what == "continue" and world.stopped:
            world.continue_store()

    @precondition(
        lambda self: not self.world.delivers or self.world.clearing or not (self.world.worker and self.world.store_up)
    )
    @rule()
    def repair(self) -> None:
        self.world.mute = self.world.stalled = False
        if self.world.stopped:
            self.world.continue_store()
        if self.world.clearing:
            self.world.end_clear()
        if self.world.worker is None:
            self.world.start_worker()
        if not self.world.store_up:
            self.world.start_store()

    # --- time

    @rule(seconds=st.sampled_from([0.01, 0.01, 0.06, 0.5, 6.0, 700.0]))
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
        self.world.settle()  # whatever the store does or does not do, every request ends
        if not self.world.delivers:
            self.repair()  # what it does late is given back
            self.world.settle()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = hypothesis_settings(print_blob=True)
