"""The scheduler's side of the front protocol, played by hand: journals requests, draws what the test says."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from shared.actor import Actor, on
from shared.messages.base import pack_u32
from shared.messages.engine import CancelRequest, Journaled, Opening, Progress, StopAt, Submit, Synced
from shared.messages.front import Cancelled, Credit, Finish, FinishReason, Timing, Usage
from shared.peers import Peer


@dataclass
class Entry:
    """One journaled request."""

    submit: Submit
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None

    def opening(self) -> Opening:
        submit = self.submit
        return Opening(
            principal=submit.principal,
            prompt_tokens=len(submit.ids) // 4,
            stop=submit.stop,
            stop_ids=submit.stop_ids,
            logprobs=False,
            detached=submit.detached,
        )


Journal = dict[str, Entry]
"""What survives the played scheduler's incarnations."""


class PlayedScheduler(Actor):
    """Tests share one `journal` between incarnations, as a restarted scheduler would read it back."""

    role_name: ClassVar[str] = "scheduler"
    accepts: ClassVar[frozenset[str]] = frozenset({"tokenizer", "detokenizer"})

    def __init__(self, *arguments: Any, journal: Journal, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.journal = journal
        self.cancels: list[CancelRequest] = []
        self.worker_ready = True
        self.answer_with: bytes | None = None  # drawn and ended at once for every new request

    def snapshot(self) -> dict[str, Any]:
        return {"worker_ready": self.worker_ready}

    def peer_up(self, peer: Peer) -> None:
        if peer.role == "detokenizer":
            for request_id in self.journal:
                peer.send(self._progress(request_id, 0))
            peer.send(Synced())

    def _progress(self, request_id: str, start: int) -> Progress:
        entry = self.journal[request_id]
        opening = entry.opening() if start == 0 else None
        ids = pack_u32(entry.tokens[start:])
        return Progress(id=request_id, start=start, ids=ids, opening=opening, finish=entry.finish)

    def _emit(self, request_id: str, start: int) -> None:
        for peer in self.mailbox.of_role("detokenizer"):
            peer.send(self._progress(request_id, start))

    @on(Submit)
    def _submit(self, peer: Peer, message: Submit) -> Journaled:
        known = message.id in self.journal
        if not known:
            self.journal[message.id] = Entry(message)
            self._emit(message.id, 0)
            if self.answer_with is not None:
                self.draw(message.id, self.answer_with[: message.max_tokens])
                self.end(message.id)
        return Journaled(id=message.id, known=known, prompt_tokens=len(message.ids) // 4)

    @on(CancelRequest)
    def _cancel(self, peer: Peer, message: CancelRequest) -> Cancelled:
        self.cancels.append(message)
        entry = self.journal.get(message.id)
        known = entry is not None and entry.finish is None
        if known:
            self.end(message.id, "cancelled")
        return Cancelled(id=message.id, known=known)

    @on(StopAt)
    def _stop_at(self, peer: Peer, message: StopAt) -> None:
        if self.journal[message.id].finish is None:
            del self.journal[message.id].tokens[message.at :]
            self.end(message.id, "stop")

    @on(Credit)
    def _credit(self, peer: Peer, message: Credit) -> None:
        pass

    def draw(self, request_id: str, data: bytes) -> None:
        """More output tokens (bytes of the toy vocabulary)."""
        entry = self.journal[request_id]
        start = len(entry.tokens)
        entry.tokens += data
        self._emit(request_id, start)

    def end(self, request_id: str, reason: FinishReason = "length") -> None:
        """The request is over."""
        entry = self.journal[request_id]
        prompt = len(entry.submit.ids) // 4
        tiers = {"device": 0, "host": 0, "disk": 0}
        usage = Usage(prompt_tokens=prompt, completion_tokens=len(entry.tokens), cached_tokens=0, cached_by_tier=tiers)
        entry.finish = Finish(reason=reason, usage=usage, timing=Timing(queued_s=0, ttft_s=0.5, total_s=1))
        self._emit(request_id, len(entry.tokens))
