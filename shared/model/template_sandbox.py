"""The Jinja environment in which chat templates run: as `transformers` has it, but bounded.

Templates come with models from anywhere. Jinja's sandbox keeps them away from Python; it doesn't keep them from
`'x' * 10**10`, from padding to a billion columns or from a hundred nested loops. So here every loop step, call and
filter counts against a budget of steps and of time, and every operation that can make something large out of
something small is checked first. What stays possible is linear in the size of messages and template.
"""

import datetime as dt
import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEXT = 16 << 20
"""Characters (or items) of any one value, and of the result."""
MAX_STEPS = 5_000_000
MAX_SECONDS = 5.0
MAX_BITS = 4096
"""Of an integer."""
MAX_WIDTH = 1000
"""Of padding."""

_REMOVED_FILTERS = ("forceescape", "pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_BLOCKED_METHODS = frozenset({"expandtabs", "format_map", "maketrans", "translate"})
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
_WIDE = re.compile(r"\d{4,}|\*|\{[^{}]*\{")
"""A width of four digits or more in a format string, or one that is taken from the arguments."""


class TooMuch(jinja2.TemplateRuntimeError):
    """The template wants more steps, time or memory than it gets."""


class Budget:
    """Steps and seconds of one rendering."""

    def __init__(self, steps: int = MAX_STEPS, seconds: float = MAX_SECONDS) -> None:
        self.steps = steps
        self.deadline = time.monotonic() + seconds

    def step(self) -> None:
        """Spends one step; TooMuch when none is left."""
        self.steps -= 1
        if self.steps < 0:
            raise TooMuch("the template takes too many steps")
        if time.monotonic() > self.deadline:
            raise TooMuch("the template takes too long")


_budget: ContextVar[Budget] = ContextVar("template_budget")


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Everything that templates do inside counts against `budget`."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


class _Items:
    """A loop's items: sized, so that `loop.length` takes nothing in advance, and each one is a step."""

    def __init__(self, items: Any) -> None:
        if not hasattr(items, "__len__"):
            items = [item for item in items if _step()]
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        budget = _budget.get()
        for item in self.items:
            budget.step()
            yield item


def _step() -> bool:
    _budget.get().step()
    return True


def weigh(value: Any) -> Any:
    """`value` itself; TooMuch when it is larger than MAX_TEXT as text (an item counts each time it appears)."""
    weight = 0
    rest = [value]
    while rest:
        item = rest.pop()
        weight += 32  # about what visiting an item costs
        if isinstance(item, str | bytes):
            weight += len(item)
        elif isinstance(item, dict):
            rest += item.keys()
            rest += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            rest += item
        elif isinstance(item, int) and item.bit_length() > MAX_BITS:
            raise TooMuch(f"the template makes a number of {item.bit_length()} bits")
        if weight + len(rest) > MAX_TEXT:
            raise TooMuch(f"the template makes a value of more than {MAX_TEXT} characters")
    return value


def _fits(length: int) -> None:
    if length > MAX_TEXT:
        raise TooMuch(f"the template makes a text of {length} characters; {MAX_TEXT} are possible")


def _check_format(text: Any, *_: Any, **__: Any) -> None:
    if _WIDE.search(str(text)):
        raise TooMuch(f"the template formats with a width of more than {MAX_WIDTH}")


def _check_width(width: Any) -> None:
    if isinstance(width, int) and width > MAX_WIDTH:
        raise TooMuch(f"the template pads to {width} columns; {MAX_WIDTH} are possible")


def _check_center(_: Any, width: Any = 80) -> None:
    _check_width(width)


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    _check_width(width)
    _fits(len(str(text)) + str(text).count("\n") * (width if isinstance(width, int) else len(str(width))))


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    _fits(len(text) + text.count(old) * len(new))


def _check_join(items: Any, d: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(items, list | tuple):
        _fits(len(items) * len(str(d)))


def _check_columns(_: Any, count: Any = 1, *__: Any, **___: Any) -> None:
    _fits(count if isinstance(count, int) else 0)


_CHEAP = frozenset({"count", "d", "default", "first", "last", "length"})
"""Filters that look at no item."""
_CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_columns,
    "center": _check_center,
    "format": _check_format,
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "slice": _check_columns,
}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As `transformers` defines it (no HTML escapes), in pieces that are counted."""
    _check_width(indent)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    out: list[str] = []
    length = 0
    for piece in encoder.iterencode(weigh(value)):
        length += len(piece)
        _fits(length)
        out.append(piece)
    return "".join(out)


def _guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that counts, and looks at its arguments and result."""
    skipped = 1 if getattr(original, "jinja_pass_arg", None) is not None else 0

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        values = args[skipped:]
        if name not in _CHEAP:
            weigh([*values, *kwargs.values()])
        check = _CHECKS.get(name)
        if check is not None:
            check(*values, **kwargs)
        made = original(*args, **kwargs)
        return made if name in _CHEAP else weigh(made)

    return guarded


class _Bound(NodeTransformer):
    """Sends loops and concatenations through the environment's guards."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not supported", node.lineno)
        node.iter = nodes.Filter(node.iter, "_items", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        guarded = [nodes.Filter(part, "_text", [], [], None, None, lineno=node.lineno) for part in node.nodes]
        joined = nodes.Concat(guarded, lineno=node.lineno)
        return nodes.Filter(joined, "_text", [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # the base class's own shape

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One for all templates of a process; rendering happens inside `spending`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_text)
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.filters = {name: _guarded(name, made) for name, made in self.filters.items()}
        self.filters |= {"_items": _Items, "_text": _text}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Bound().visit(tree)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Beside the sandbox's own rules: no method that makes much out of little by a table."""
        return attr not in _BLOCKED_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic and repetition, sized before they are done."""
        _budget.get().step()
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
                    _fits(len(one) * max(0, other))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_BITS:
                raise TooMuch(f"the template makes a number of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            weigh(right)
        made = super().call_binop(context, operator, left, right)
        if isinstance(made, str | bytes | list | tuple):
            _fits(len(made))
        elif isinstance(made, int) and made.bit_length() > MAX_BITS:
            raise TooMuch(f"the template makes a number of more than {MAX_BITS} bits")
        return made

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Each call is a step; methods of strings are sized before they run."""
        _budget.get().step()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps str.format
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            if name in _PADDING:
                _check_width(args[0] if args else 0)
            elif name == "format":
                _check_format(owner)
                weigh([*args, *kwargs.values()])
            elif name == "replace":
                _check_replace(owner, *args)
            elif name == "join" and args:
                _check_join(args[0], owner)
                weigh(args[0])
        return super().call(__context, __obj, *args, **kwargs)


def _text(value: Any) -> Any:
    """What is about to become text."""
    _budget.get().step()
    return weigh(value)


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def strftime(now: dt.datetime | None) -> Callable[[str], str]:
    """The template function `strftime_now`, on a fixed time or on the clock."""

    def strftime_now(pattern: str) -> str:
        _check_format(pattern)
        return (now or dt.datetime.now()).strftime(pattern)

    return strftime_now
