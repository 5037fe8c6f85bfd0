"""Bending decoded values (msgpack, JSON), and making instances of our own structs to begin with."""

import copy
import types
import typing
from collections.abc import Callable
from random import Random
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
    0.5,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x" * 300,
    "\0",
    "\u202e\U0001f469\u200d",
    [],
    {},
    [[[[[[]]]]]],
    {"": {"": {}}},
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a value of lists and dicts."""
    found: list[tuple[Any, Any]] = []
    rest = [value]
    while rest:
        item = rest.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        for key in keys:
            found.append((item, key))
            rest.append(item[key])
    return found


def _odd(rng: Random) -> Any:
    return copy.deepcopy(rng.choice(ODD))


def bent_value(value: Any, rng: Random) -> Any:
    """`value` (changed in place) after one to three changes of its parts."""
    for _ in range(rng.randint(1, 3)):
        known = places(value)
        if not known:
            return _odd(rng)
        container, key = rng.choice(known)
        other, other_key = rng.choice(known)
        match rng.randrange(6):
            case 0 | 1:
                container[key] = _odd(rng)
            case 2:
                container[key] = copy.deepcopy(other[other_key])
            case 3:
                del container[key]
            case 4 if isinstance(container, dict):
                container[rng.choice(("", "type", f"{key}x", "x" * 70_000))] = _odd(rng)
            case 4:
                container.insert(key, _odd(rng))
            case _:
                container[key] = _stretched(container[key], rng)
    return value


def _stretched(value: Any, rng: Random) -> Any:
    if isinstance(value, bool) or value is None:
        return _odd(rng)
    if isinstance(value, int):  # msgpack has these and no others
        near = rng.choice((-value, value + 1, value - 1, value ^ 1 << rng.randrange(62)))
        return max(-(1 << 63), min(near, (1 << 64) - 1))
    if isinstance(value, str | bytes | list):
        return rng.choice((value * 2, value[: len(value) // 2], value[:-1], value * 40))
    return [value] * rng.randint(1, 3)


def sample(kind: Any, rng: Random) -> Any:
    """An instance of a type of our messages: struct, union, literal, tuple, dict, scalar, Any."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return sample(rng.choice(arguments), rng)
    if origin is Literal:
        return rng.choice(arguments)
    if origin is dict:
        return {sample(arguments[0], rng): sample(arguments[1], rng) for _ in range(rng.randint(0, 3))}
    if origin in (tuple, list):
        same = origin is list or arguments[-1:] == (Ellipsis,)
        items = [arguments[0]] * rng.randint(0, 3) if same else arguments
        return origin(sample(item, rng) for item in items)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: sample(hints[field.name], rng) for field in msgspec.structs.fields(kind)})
    maker = _SCALARS.get(kind)
    if maker is None:
        raise TypeError(f"no sample of {kind!r} can be made")
    return maker(rng)


_SCALARS: dict[Any, Callable[[Random], Any]] = {
    bool: lambda rng: rng.random() < 0.5,
    int: lambda rng: rng.choice((0, 1, 7, 4096, 2**32, rng.getrandbits(63))),
    float: lambda rng: rng.choice((0.0, 1.0, 0.25, 1e9)),
    str: lambda rng: rng.choice(("", "e0", "0" * 32, "user", "päß\n")),
    bytes: lambda rng: rng.randbytes(rng.choice((0, 4, 8, 32, 64, 96))),
    type(None): lambda rng: None,
    None: lambda rng: None,
    Any: lambda rng: {"tiers": {"host": [1, 2.5, "x", None]}},
}
