"""From a validated Generate to the Submit that the scheduler journals: every default resolved."""

from typing import TypeVar

from shared.messages.engine import SampleSpec, Submit
from shared.messages.front import Generate, Sampling
from shared.model.spec import ModelSpec, SamplingDefaults

T = TypeVar("T", int, float)


def submission(
    request: Generate, digest: bytes, principal: str, salt: bytes, ids: bytes, max_tokens: int, spec: ModelSpec
) -> Submit:
    """`salt`: of the request's namespace; `ids`: the prompt, packed u32; `max_tokens` resolved; the model's own
    sampling defaults and stop set apply.
    """
    sampling = request.sampling
    return Submit(
        id=request.id,
        digest=digest,
        principal=principal,
        ids=ids,
        max_tokens=max_tokens,
        sample=sample_spec(sampling, spec.sampling),
        seeded=sampling.seed is not None,
        stop_ids=() if sampling.ignore_eos else spec.stop_ids,
        stop=sampling.stop,
        salt=salt,
        no_store=request.no_store,
        no_read=request.no_read,
        detached=request.detached,
        deadline_s=request.deadline_s,
    )


def sample_spec(wanted: Sampling, model: SamplingDefaults) -> SampleSpec:
    """What the client asks for, over what the model's files suggest."""
    return SampleSpec(
        temperature=_or(wanted.temperature, model.temperature),
        top_k=_or(wanted.top_k, model.top_k),
        top_p=_or(wanted.top_p, model.top_p),
        min_p=_or(wanted.min_p, model.min_p),
        seed=(wanted.seed or 0) % (1 << 64),
        logprobs=-1 if wanted.logprobs is None else wanted.logprobs,
    )


def _or(wanted: T | None, default: T) -> T:
    return default if wanted is None else wanted
