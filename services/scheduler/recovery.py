"""Folding the journal: records of earlier lives -> requests as they stood when the last record was written."""

from collections.abc import Iterable

from services.scheduler.records import Accept, Admit, AnyRecord, Ended, Step, StepRow
from services.scheduler.request import Request
from shared.messages.base import unpack_u32


def fold(records: Iterable[AnyRecord]) -> list[Request]:
    """Requests by age. The first journaled token of an index wins, and the last Ended; rows that would leave a
    gap, and records of requests that are not known (their segment is gone), are passed over.
    """
    requests: dict[int, Request] = {}
    for record in records:
        if isinstance(record, Accept):
            requests.setdefault(record.key, Request.of(record))
        elif isinstance(record, Admit):
            if (request := requests.get(record.key)) and request.admit is None:
                request.admit, request.admit_journaled = record, True
        elif isinstance(record, Step):
            for row in record.rows:
                if request := requests.get(row.key):
                    _apply(request, row, record.at)
        elif request := requests.get(record.key):
            _end(request, record)
    return sorted(requests.values(), key=lambda request: request.key)


def _apply(request: Request, row: StepRow, at: float) -> None:
    if request.finish is not None or row.start > request.output_tokens:
        return
    ids = unpack_u32(row.ids)
    for i in range(request.output_tokens - row.start, len(ids)):
        request.add(at, ids[i], row.logprobs[i] if row.logprobs and i < len(row.logprobs) else None)


def _end(request: Request, ended: Ended) -> None:
    request.finish, request.ended_at = ended.finish, ended.at
    if ended.finish.usage.completion_tokens < request.output_tokens:
        request.cut(ended.finish.usage.completion_tokens)
