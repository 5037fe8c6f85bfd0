"""The detokenizer's decisions, event by event."""

from collections.abc import Iterable

import pytest

from services.detokenizer.requests import (
    MAX_CREDIT,
    MAX_FOLLOWERS,
    MAX_ID,
    MAX_PARKED,
    MAX_PARKED_EACH,
    PROGRESS_WINDOW,
    Answer,
    Complain,
    Effect,
    Requests,
    ToClient,
    ToScheduler,
)
from shared.identity import LOCAL
from shared.messages.base import pack_u32, unpack_u32
from shared.messages.engine import CancelRequest, Forget, Opening, Progress, StopAt
from shared.messages.front import (
    Attach,
    Attached,
    Chunk,
    Credit,
    Finish,
    FinishReason,
    Rejected,
    Timing,
    TokenLogprob,
    Usage,
)

ID = "ab" * 16
GRACE = 60.0


def requests() -> Requests:
    """Token ids below 256 are bytes, 256 is special."""
    made = Requests(lambda token: bytes((token,)) if token < 256 else b"", grace_s=GRACE)
    made.scheduler_up()
    made.synced(0.0)
    return made


def opening(
    stop: tuple[str, ...] = (), *, principal: str = "me", logprobs: bool = False, detached: bool = False
) -> Opening:
    return Opening(
        principal=principal, prompt_tokens=3, stop=stop, stop_ids=(256,), logprobs=logprobs, detached=detached
    )


def finish(tokens: int, reason: FinishReason = "length") -> Finish:
    usage = Usage(prompt_tokens=3, completion_tokens=tokens, cached_tokens=0, cached_by_tier={})
    return Finish(reason=reason, usage=usage, timing=Timing(queued_s=0, ttft_s=0, total_s=0))


def opened(text: str = "", stop: tuple[str, ...] = (), end: Finish | None = None, request_id: str = ID) -> Progress:
    return Progress(id=request_id, start=0, ids=pack_u32(list(text.encode())), opening=opening(stop), finish=end)


def more(start: int, text: str, end: Finish | None = None) -> Progress:
    return Progress(id=ID, start=start, ids=pack_u32(list(text.encode())), finish=end)


def chunks(effects: Iterable[Effect], client: str = "c") -> list[Chunk]:
    return [
        e.message for e in effects if isinstance(e, ToClient) and e.client == client and isinstance(e.message, Chunk)
    ]


def told(effects: Iterable[Effect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, ToScheduler)]


def answers(effects: Iterable[Effect]) -> list[Attached | Rejected]:
    return [effect.message for effect in effects if isinstance(effect, Answer)]


def text(found: Iterable[Chunk]) -> str:
    return "".join(chunk.text for chunk in found)


def test_tokens_reach_a_follower_as_they_come_and_the_finish_ends_the_attachment() -> None:
    books = requests()
    books.progress(opened(), 0.0)
    assert answers(books.attach("c", "me", Attach(id=ID), 1, 0.0)) == [Attached(id=ID)]
    first = chunks(books.progress(more(0, "ab"), 0.0))
    last = chunks(books.progress(more(2, "c", finish(3)), 0.0))
    assert [(c.start, c.end, c.text, c.finish is None) for c in first + last] == [
        (0, 2, "ab", True),
        (2, 3, "c", False),
    ]
    assert books.statistics().attachments == 0
    books.check_integrity()


def test_progress_that_repeats_or_overlaps_changes_nothing() -> None:
    books = requests()
    books.progress(opened("abc"), 0.0)
    books.attach("c", "me", Attach(id=ID), 1, 0.0)
    assert chunks(books.progress(more(1, "bc"), 0.0)) == []
    assert [(c.start, c.end, c.text) for c in chunks(books.progress(more(2, "cde"), 0.0))] == [(3, 5, "de")]


@pytest.mark.parametrize(
    "wrong",
    [
        more(2, "z"),  # a gap
        more(0, "zz"),  # other tokens than before
        more(1, "b", finish(9)),  # a finish beyond the tokens
        Progress(id="00" * 16, start=0, ids=b""),  # never opened
    ],
)
def test_a_violation_is_told_and_leaves_all_as_it_was_until_the_replay(wrong: Progress) -> None:
    books = requests()
    books.progress(opened("a"), 0.0)
    books.attach("c", "me", Attach(id=ID), 1, 0.0)
    effects = books.progress(wrong, 0.0)
    assert [type(effect) for effect in effects] == [Complain]
    assert books.statistics().violations == 1
    assert text(chunks(books.progress(opened("abc", end=finish(3)), 0.0))) == "bc"


def test_t03_a_stop_string_is_told_to_the_scheduler_and_the_finish_is_waited_for() -> None:
    books = requests()
    books.progress(opened("ABC ", stop=("C D",)), 0.0)
    books.attach("c", "me", Attach(id=ID), 1, 0.0)
    effects = books.progress(more(4, "DEF"), 0.0)
    assert told(effects) == [StopAt(id=ID, at=5)]
    assert [(c.start, c.end, c.text, c.finish) for c in chunks(effects)] == [(4, 5, "", None)]
    assert books.progress(more(7, "GHI"), 0.0) == []  # drawn before the scheduler heard of the stop
    (last,) = chunks(books.progress(more(10, "", finish(5, "stop")), 0.0))
    assert (last.start, last.end, last.text) == (5, 5, "")
    assert last.finish == finish(5, "stop")


@pytest.mark.parametrize("reason", ["length", "cancelled", "deadline", "error"])
def test_t03_a_request_whose_stop_string_was_complete_ended_there_whatever_came_first(reason: FinishReason) -> None:
    books = requests()
    books.progress(opened("xSTOPyz", stop=("STOP",), end=finish(7, reason)), 0.0)
    found = chunks(books.attach("c", "me", Attach(id=ID), 1, 0.0))
    assert text(found) == "x"
    assert found[-1].finish == finish(5, "stop")
    assert b"".join(chunk.ids for chunk in found) == pack_u32(list(b"xSTOP"))


def test_text_held_back_for_a_stop_string_comes_with_the_finish() -> None:
    books = requests()
    books.progress(opened("aST", stop=("STOP",)), 0.0)
    assert text(chunks(books.attach("c", "me", Attach(id=ID), 1, 0.0))) == "a"
    assert text(chunks(books.progress(more(3, "", finish(3)), 0.0))) == "ST"


def test_tokens_beyond_the_finish_count_neither_as_ids_nor_as_text() -> None:
    books = requests()
    books.progress(opened("abcde"), 0.0)
    books.progress(more(5, "", finish(3, "cancelled")), 0.0)
    found = chunks(books.attach("c", "me", Attach(id=ID), 1, 0.0))
    assert text(found) == "abc"
    assert b"".join(chunk.ids for chunk in found) == pack_u32(list(b"abc"))


def test_i10_attaching_again_from_any_token_joins_to_the_same_text() -> None:
    whole = "é✅ab\n"
    pieces = whole.encode()
    for start in range(len(pieces) + 1):
        books = requests()
        books.progress(opened(whole, stop=("b!",)), 0.0)
        before = chunks(books.attach("c", "me", Attach(id=ID), 1, 0.0))[0]
        head = books._requests[ID].output.chunk(0)
        assert head == before
        known = books._requests[ID].output._text.released(0, start)
        books.gone("c", 0.0)
        books.attach("d", "me", Attach(id=ID, start=start), 2, 0.0)
        books.gone("d", 0.0)
        books.progress(more(len(pieces), "", finish(len(pieces))), 0.0)
        rest = chunks(books.attach("e", "me", Attach(id=ID, start=start), 3, 0.0), "e")
        assert known + text(rest) == whole
        assert rest[0].start == start


def test_a_new_detokenizer_gives_the_rest_from_the_replay_alone() -> None:
    old, new = requests(), requests()
    old.progress(opened("abSTcd", stop=("STOP",)), 0.0)
    seen = chunks(old.attach("c", "me", Attach(id=ID), 1, 0.0))
    new.attach("c", "me", Attach(id=ID, start=seen[-1].end), 1, 0.0)
    rest = chunks(new.progress(opened("abSTcdOP", stop=("STOP",), end=finish(8)), 0.0))
    assert text(seen + rest) == "abSTcdOP"


def test_after_a_scheduler_restart_the_replay_neither_loses_nor_doubles() -> None:
    books = requests()
    books.progress(opened("ab"), 0.0)
    seen = chunks(books.attach("c", "me", Attach(id=ID), 1, 0.0))
    books.scheduler_down()
    books.scheduler_up()
    seen += chunks(books.progress(opened("abcd"), 1.0))
    books.synced(1.0)
    seen += chunks(books.progress(more(4, "e", finish(5)), 1.0))
    assert [(c.start, c.end, c.text) for c in seen] == [(0, 2, "ab"), (2, 4, "cd"), (4, 5, "e")]


def test_stops_and_cancels_are_told_again_to_a_scheduler_that_lost_them() -> None:
    books = requests()
    stop_at = StopAt(id=ID, at=2)
    assert told(books.progress(opened("ab", stop=("b",)), 0.0)) == [stop_at]
    assert told(books.tick(GRACE)) == [CancelRequest(id=ID, principal="me", reason="abandoned")]
    assert told(books.tick(GRACE + 1)) == []
    books.scheduler_up()
    assert told(books.progress(opened("ab", stop=("b",)), GRACE + 2)) == [stop_at]
    assert told(books.tick(GRACE + 3)) == [CancelRequest(id=ID, principal="me", reason="abandoned")]


def test_requests_that_a_new_scheduler_does_not_know_end_for_their_followers() -> None:
    books = requests()
    books.progress(opened("ab"), 0.0)
    books.attach("c", "me", Attach(id=ID), 1, 0.0)
    books.scheduler_up()
    (effect,) = books.synced(1.0)
    assert isinstance(effect, ToClient)
    assert isinstance(effect.message, Rejected)
    assert effect.message.code == "not_found"
    assert books.statistics().requests == 0


def test_an_unknown_id_waits_five_seconds_and_is_then_not_found() -> None:
    books = requests()
    assert books.attach("c", "me", Attach(id=ID), "ticket", 10.0) == []
    assert books.tick(14.9) == []
    (effect,) = books.tick(15.0)
    assert isinstance(effect, Answer)
    assert effect.ticket == "ticket"
    assert isinstance(effect.message, Rejected)
    assert effect.message.code == "not_found"
    assert books.tick(16.0) == []


def test_while_the_scheduler_is_away_nothing_is_unknown() -> None:
    books = requests()
    books.scheduler_down()
    books.attach("c", "me", Attach(id=ID), 1, 0.0)
    assert books.tick(100.0) == []
    books.scheduler_up()
    assert books.tick(200.0) == []
    books.synced(200.0)
    assert books.tick(204.9) == []
    assert answers(books.progress(opened(), 204.9)) == [Attached(id=ID)]


def test_an_attach_that_was_parked_follows_as_soon_as_the_request_opens() -> None:
    books = requests()
    books.attach("c", "me", Attach(id=ID), 1, 0.0)
    effects = books.progress(opened("ab"), 1.0)
    assert answers(effects) == [Attached(id=ID)]
    assert text(chunks(effects)) == "ab"
    books.check_integrity()


def test_another_principal_learns_nothing_not_even_that_the_id_exists() -> None:
    books = requests()
    books.attach("early", "you", Attach(id=ID), 1, 0.0)
    (early,) = answers(books.progress(opened("secret"), 0.0))
    (late,) = answers(books.attach("late", "you", Attach(id=ID), 1, 0.0))
    books.attach("c", "you", Attach(id="cd" * 16), 1, 0.0)
    (unknown,) = answers(books.tick(5.0))
    assert isinstance(unknown, Rejected)
    for refused in (early, late):
        assert isinstance(refused, Rejected)
        assert (refused.code, refused.reason) == ("not_found", unknown.reason.replace("cd" * 16, ID))


def test_several_clients_follow_one_request_each_at_its_own_place() -> None:
    books = requests()
    books.progress(opened("abc"), 0.0)
    assert text(chunks(books.attach("c", "me", Attach(id=ID), 1, 0.0))) == "abc"
    assert text(chunks(books.attach("d", "me", Attach(id=ID, start=2), 1, 0.0), "d")) == "c"
    effects = books.progress(more(3, "d", finish(4)), 0.0)
    assert text(chunks(effects)) == text(chunks(effects, "d")) == "d"


def test_attaching_again_on_the_same_connection_replaces_the_attachment() -> None:
    books = requests()
    books.progress(opened("abc"), 0.0)
    books.attach("c", "me", Attach(id=ID), 1, 0.0)
    assert text(chunks(books.attach("c", "me", Attach(id=ID, start=1), 2, 0.0))) == "bc"
    assert text(chunks(books.progress(more(3, "d"), 0.0))) == "d"
    assert books.statistics().attachments == 1


def test_t07_a_client_without_credit_gets_everything_it_missed_in_one_chunk() -> None:
    books = requests()
    books.progress(opened(), 0.0)
    books.attach("c", "me", Attach(id=ID, credit=2), 1, 0.0)
    letters = "abcdefghij" * 30
    sent = [c for i, letter in enumerate(letters) for c in chunks(books.progress(more(i, letter), 0.0))]
    assert [(c.start, c.end) for c in sent] == [(0, 1), (1, 2)]
    assert books.statistics().stalled == 1
    sent += chunks(books.credit("c", Credit(id=ID, chunks=1)))
    assert [(c.start, c.end) for c in sent[2:]] == [(2, 300)]
    sent += chunks(books.progress(more(300, "", finish(300)), 0.0))
    assert sent[-1].finish is None  # the finish costs a credit too
    sent += chunks(books.credit("c", Credit(id=ID, chunks=1)))
    assert sent[-1].finish is not None
    assert text(sent) == letters
    books.check_integrity()


def test_i05_a_chunk_that_found_no_room_is_made_again_and_nothing_is_lost() -> None:
    books = requests()
    books.progress(opened("ab"), 0.0)
    (first,) = chunks(books.attach("c", "me", Attach(id=ID), 1, 0.0))
    books.unsent("c", first)
    assert text(chunks(books.tick(1.0))) == "ab"
    (last,) = chunks(books.progress(more(2, "c", finish(3)), 1.0))
    books.unsent("c", last)
    books.check_integrity()
    (again,) = chunks(books.tick(2.0))
    assert (again.text, again.finish) == ("c", finish(3))


def test_credit_is_bounded_and_nonsense_is_refused() -> None:
    books = requests()
    books.progress(opened("ab"), 0.0)
    for attach in (Attach(id=ID, start=-1), Attach(id=ID, credit=0), Attach(id=ID, credit=MAX_CREDIT + 1)):
        (refused,) = answers(books.attach("c", "me", attach, 1, 0.0))
        assert isinstance(refused, Rejected)
        assert refused.code == "bad_request"
    books.attach("c", "me", Attach(id=ID), 1, 0.0)
    books.credit("c", Credit(id=ID, chunks=1 << 40))
    books.credit("c", Credit(id=ID, chunks=-5))
    books.credit("nobody", Credit(id=ID, chunks=1))
    books.check_integrity()


def test_followers_and_parked_attaches_are_bounded() -> None:
    books = requests()
    books.progress(opened(), 0.0)
    for n in range(MAX_FOLLOWERS):
        assert answers(books.attach(n, "me", Attach(id=ID), n, 0.0)) == [Attached(id=ID)]
    (refused,) = answers(books.attach("more", "me", Attach(id=ID), 1, 0.0))
    assert isinstance(refused, Rejected)
    assert refused.code == "overloaded"
    for n in range(MAX_PARKED):
        assert books.attach(n, LOCAL, Attach(id=f"{n:032x}"), n, 0.0) == []
    (refused,) = answers(books.attach("more", LOCAL, Attach(id="ff" * 16), 1, 0.0))
    assert isinstance(refused, Rejected)
    assert refused.code == "overloaded"
    books.check_integrity()


def test_one_users_parked_attaches_leave_room_for_others() -> None:
    books = requests()
    for n in range(MAX_PARKED_EACH):
        assert books.attach(n % 7, "alice", Attach(id=f"{n:032x}"), n, 0.0) == []
    (refused,) = answers(books.attach(8, "alice", Attach(id="ff" * 16), 1, 0.0))
    assert isinstance(refused, Rejected)
    assert refused.code == "overloaded"
    assert str(MAX_PARKED_EACH) in refused.reason
    assert books.attach(9, "bob", Attach(id="ff" * 16), 1, 0.0) == []
    books.gone(0, 1.0)
    assert books.attach(8, "alice", Attach(id="ff" * 16), 1, 0.0) == []
    books.check_integrity()


def test_an_id_that_no_request_can_have_is_not_kept() -> None:
    books = requests()
    (refused,) = answers(books.attach("c", "me", Attach(id="f" * (1 << 20)), 1, 0.0))
    assert isinstance(refused, Rejected)
    assert refused.code == "not_found"
    assert len(refused.reason) < 2 * MAX_ID
    assert books.statistics().parked == 0


def test_a_request_nobody_follows_is_cancelled_after_the_grace_unless_detached() -> None:
    books = requests()
    books.progress(opened("ab"), 0.0)
    detached = Progress(id="cd" * 16, start=0, ids=b"", opening=opening(detached=True))
    books.progress(detached, 0.0)
    books.attach("c", "me", Attach(id=ID), 1, 10.0)
    assert told(books.tick(1000.0)) == []
    books.gone("c", 1000.0)
    assert told(books.tick(1000.0 + GRACE - 1)) == []
    assert told(books.tick(1000.0 + GRACE)) == [CancelRequest(id=ID, principal="me", reason="abandoned")]


def test_a_forgotten_request_goes_with_the_next_tick_and_its_id_may_be_used_anew() -> None:
    books = requests()
    books.progress(opened("ab", end=finish(2)), 0.0)
    books.forget(Forget(id=ID), 0.0)
    books.progress(opened("xy"), 0.0)
    assert text(chunks(books.attach("c", "me", Attach(id=ID), 1, 0.0))) == "xy"
    books.gone("c", 0.0)
    books.forget(Forget(id=ID), 0.0)
    books.tick(0.1)
    assert books.statistics().requests == 0


def test_a_forgotten_request_stays_for_its_reader_but_not_for_ever() -> None:
    books = requests()
    books.progress(opened("ab", end=finish(2)), 0.0)
    books.attach("c", "me", Attach(id=ID, credit=1), 1, 0.0)
    books.progress(opened("ab", end=finish(2), request_id="cd" * 16), 0.0)
    books.attach("d", "me", Attach(id="cd" * 16), 1, 0.0)
    assert books.statistics().attachments == 0  # both had their finish
    books = requests()
    books.progress(opened("ab"), 0.0)
    books.attach("c", "me", Attach(id=ID, credit=1), 1, 0.0)
    books.progress(more(2, "c", finish(3)), 0.0)
    books.forget(Forget(id=ID), 0.0)
    assert books.tick(GRACE - 1) == []
    assert text(chunks(books.credit("c", Credit(id=ID, chunks=1)))) == "c"
    books.tick(GRACE)
    assert books.statistics().requests == 0


def test_the_scheduler_gets_credit_back_as_progress_is_consumed() -> None:
    books = requests()
    assert told(books.scheduler_up()) == [Credit(chunks=PROGRESS_WINDOW)]
    given = []
    for n in range(PROGRESS_WINDOW):
        given += told(books.progress(more(0, "a") if n else opened(), 0.0))
    assert sum(credit.chunks for credit in given if isinstance(credit, Credit)) == PROGRESS_WINDOW


def test_logprobs_stay_aligned_to_tokens_through_stops_and_reattaching() -> None:
    books = requests()
    logprobs = tuple(TokenLogprob(chosen=-float(n), top_ids=b"", top=()) for n in range(6))
    first = Progress(
        id=ID, start=0, ids=pack_u32(list(b"abSTOP")), opening=opening(("STO",), logprobs=True), logprobs=logprobs
    )
    books.progress(first, 0.0)
    books.progress(Progress(id=ID, start=6, ids=b"", logprobs=(), finish=finish(6)), 0.0)
    (chunk,) = chunks(books.attach("c", "me", Attach(id=ID, start=1), 1, 0.0))
    assert list(unpack_u32(chunk.ids)) == list(b"bSTO")
    assert chunk.logprobs == logprobs[1:5]
    bad = Progress(id=ID, start=0, ids=pack_u32(list(b"ab")), opening=first.opening, logprobs=logprobs[:1])
    assert any(isinstance(effect, Complain) for effect in books.progress(bad, 0.0))
