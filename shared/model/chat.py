"""Chat messages -> prompt text, by the template that the model carries; rendered in a bounded sandbox."""

import datetime as dt
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jinja2

from shared.model.template_sandbox import MAX_TEXT, Budget, TemplateEnvironment, TooMuch, spending, strftime

MAX_SOURCE = 1 << 20
"""Characters of a template."""


class TemplateError(ValueError):
    """A template can't be used, or refuses these messages; the text is the template's own where it gave one."""


@cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


class ChatTemplate:
    """One compiled template. `tokens` are the variables bos_token, eos_token, ... of `ModelSpec.template_tokens`."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters; {MAX_SOURCE} are possible")
        self.tokens = dict(tokens)
        try:
            with spending(Budget()):  # constants are folded when the template is compiled
                self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is wrong in line {error.lineno}: {error.message}") from None
        except Exception as error:  # whatever the compiler or a folded constant raises
            raise TemplateError(f"the chat template can't be compiled: {_say(error)}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        now: dt.datetime | None = None,
        budget: Budget | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of `messages` (plain dicts with role and content); encode it with `prompt.encode`.

        `now` fixes what `strftime_now` sees; `variables` are seen by the template (enable_thinking, tools, ...).
        TemplateError when the template refuses the messages (`raise_exception`), fails, or takes too much.
        """
        known = {"tools": None, "documents": None} | self.tokens | variables
        known |= {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        known["strftime_now"] = strftime(now)
        out: list[str] = []
        length = 0
        try:
            with spending(budget or Budget()):
                for piece in self._template.generate(known):
                    length += len(piece)
                    if length > MAX_TEXT:
                        raise TooMuch(f"the chat template writes more than {MAX_TEXT} characters")
                    out.append(piece)
        except Exception as error:  # a template can make Python raise anything
            raise TemplateError(_say(error)) from None
        return "".join(out)


def _say(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateError):
        return error.message or type(error).__name__
    if isinstance(error, RecursionError):
        return "the chat template recurses too deeply"
    return f"the chat template failed: {type(error).__name__}: {error}"[:500]
