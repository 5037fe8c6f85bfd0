"""From a request's input to prompt ids: plain text, a chat through the model's template, or ids as they are."""

import json
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from services.tokenizer.validate import Limits, Refusal, too_long
from shared.messages.base import pack_u32
from shared.messages.front import ChatMessage, Generate
from shared.model.chat import ChatTemplate, TemplateError
from shared.model.prompt import encode
from shared.model.spec import ModelSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer


EXACT_BYTES = 1 << 20
"""Texts up to this size are always encoded, so that a refusal can give the exact number of tokens. A longer one that
can't fit is refused by a lower bound: encoding it would take seconds and hundreds of bytes of memory a token.
"""


class Encoder:
    """One model's vocabulary and template; safe to use from several threads. Takes a moment to make.

    Raises TemplateError when the model's own template can't even be compiled: better at start than at each chat.
    """

    def __init__(self, spec: ModelSpec, tokenizer: "Tokenizer", limits: Limits) -> None:
        self.spec = spec
        self._tokenizer = tokenizer
        self._max_context = limits.max_context
        self._template = ChatTemplate(spec.chat_template, spec.template_tokens) if spec.chat_template else None
        self._token_bytes = _most_bytes_a_token(tokenizer)

    def encode(self, request: Generate) -> bytes:
        """Prompt ids, packed u32; exactly one BOS where the model wants one, ids given as ids untouched.

        Refusal: bad_request when the template refuses the messages, `unsupported` when the model has none,
        context_too_long for a text so long that it need not be counted.
        """
        if request.ids is not None:
            return request.ids
        text = request.prompt if request.messages is None else self._render(request.messages)
        text = text or ""
        if self._token_bytes and len(text) > EXACT_BYTES:
            least = -(-len(text) // self._token_bytes)
            if least >= self._max_context:
                raise too_long(least, self._max_context, at_least=True)
        return pack_u32(encode(self._tokenizer, self.spec, text))

    def _render(self, messages: tuple[ChatMessage, ...]) -> str:
        if self._template is None:
            reason = f"model {self.spec.name} has no chat template; send a prompt, or serve a chat model"
            raise Refusal("unsupported", reason)
        try:
            return self._template.render([asdict(message) for message in messages])
        except TemplateError as error:
            raise Refusal("bad_request", f"the model's chat template refuses these messages: {error}") from None


def _most_bytes_a_token(tokenizer: "Tokenizer") -> int:
    """Bytes that a token can stand for at most, 0 when there is no telling (text is rewritten before it is split)."""
    normalizer = json.loads(tokenizer.normalizer.__getstate__())["type"] if tokenizer.normalizer is not None else ""
    if normalizer not in ("", "NFC"):
        return 0
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return 0  # such a token swallows any amount of white space
    longest = max(len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True))
    return longest * 3 if normalizer else longest  # NFC makes text at most three times shorter
