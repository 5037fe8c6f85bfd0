"""One `perdure.toml`, environment overrides `PERDURE_SECTION__KEY`, strict: an unknown key names the nearest known.

Every key has a default that works on a laptop. Sizes are bytes; strings like "1 GiB" are read too.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

GIB = 1 << 30
MAX_SIZE_DIGITS = 18


class ConfigError(ValueError):
    """A key or value is wrong; the text names it and the way out."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the sections."""


class ModelConfig(Section, frozen=True):
    """`source`: a known name, a Hugging Face directory, a .gguf file, or toy:<seed> (the integer test model)."""

    source: str = "smollm2-135m-instruct"
    dir: str = ""
    """Where fetched models lie; empty: PERDURE_HOME/models."""
    backend: str = "auto"
    activations: str = "fp32"
    """What products are computed from: fp32, or int8 (on the cpu backend, of 4- and 8-bit weights)."""
    max_context: int = 0
    """0: the model's own."""
    threads: int = 0
    """Compute threads; 0: the cores this process may use."""


class KVConfig(Section, frozen=True):
    """The worker's pool."""

    pool_bytes: int = GIB
    dtype: str = "auto"
    block_tokens: int = 0
    """Tokens a block, a power of two; 0: the one whose block is nearest 1 MiB."""
    prefix_cache: bool = True
    huge_pages: str = "auto"
    """auto (ask, and show in status what came of it), on (and warn when there are none), off."""
    lock_memory: bool = False
    """Keep the pool from being swapped out; needs RLIMIT_MEMLOCK."""


class SchedulerConfig(Section, frozen=True):
    """Batching and retention."""

    engine: str = "e0"
    policy: str = "fcfs"
    """fcfs, or lpm (longest prefix match first, with ageing)."""
    prefetch: str = "timeout"
    """How a request waits for its prefix from disk: timeout (until it is there or a bound is reached)."""
    restore: str = "load"
    """A prefix that the store has: load (always waited for), both (always computed from the front while it is loaded
    from the back), auto (loaded or computed, whatever is quicker by what was measured)."""
    step_tokens: int = 256
    """Token budget of a step: decodes first, prefill chunks with the rest."""
    plans_out: int = 2
    """Plans that the worker may have: 2, so that the next is made and sent while one runs, or 1."""
    burst_s: float = 0.05
    """Decodes that nobody waits behind are planned several steps at once, as many as take about so long: a token may
    come so much later, and costs less. 0: one step a plan."""
    max_running: int = 64
    max_waiting: int = 4096
    result_ttl_s: float = 600.0
    """How long a finished request can still be attached to, and its id stays known."""
    max_retained: int = 4096
    """Finished requests kept at most; with more, those that ended first are forgotten before their time."""
    grace_s: float = 60.0
    """How long a request without an attached client goes on."""
    store_wait_s: float = 2.0
    """How long a started scheduler waits for the store before it computes what the store may hold."""
    lookup_s: float = 0.05
    load_s: float = 5.0
    """Upper bound of one request's wait on the store."""


class StoreConfig(Section, frozen=True):
    """Host and disk tier."""

    host_bytes: int = GIB
    """0: only a small staging area."""
    disk_bytes: int = 8 * GIB
    """0: no disk tier."""
    disk_floor: float = 0.05
    """Share of the file system that is left free."""
    arena_dir: str = "/dev/shm"
    huge_pages: str = "auto"
    """auto (ask, and show in status what came of it), on (and warn when there are none), off."""
    lock_memory: bool = False
    """Keep the arena from being swapped out; needs RLIMIT_MEMLOCK."""
    nice: int = 10
    """How much the store's IO threads and the worker's saves yield to computing (0 to 19)."""


class FrontConfig(Section, frozen=True):
    """Clients over TCP; see docs/security.md."""

    tcp: str = ""
    """IP address and port of the tokenizer, e.g. 127.0.0.1:7101; the detokenizer has the next port. Empty: no TCP."""
    user_requests: int = 64
    """Requests of one key's user that wait or run at the same time."""
    max_connections: int = 256
    """TCP connections of each of the two; beyond it nobody else is let in."""


class LedgerConfig(Section, frozen=True):
    """The record of finished requests."""

    keep_h: float = 24.0


class SuperviseConfig(Section, frozen=True):
    """How services are watched."""

    hang_s: float = 10.0
    grace_s: float = 4.0
    nice: int = 10
    """How much tokenizer, detokenizer and gateway yield to scheduler, worker and store (0 to 19)."""
    step_s: float = 120.0
    """The least time after which a step of the worker that goes on counts as hung; 0: never."""
    load_s: float = 120.0
    """How long loading the model may go on while nothing moves (no weights, no read, no core used); 0: for ever."""
    max_failures: int = 5
    """Exits before ready, in a row, after which the stack stops."""
    recovery_timeout_s: float = 30.0
    """How long a client waits for a service that is away."""


class FaultsConfig(Section, frozen=True):
    """Fault hooks for tests; absent by default, shown in red by `perdure status`. See `shared/faults.py`."""

    hooks: dict[str, str] = {}
    retract_every: int = 0
    fixed_ids: str = ""
    """Comma-separated token ids that every request "generates"."""
    record_plans: str = ""
    """File to which the worker appends every plan that it executes, for replays by the benchmark."""
    record_commits: str = ""
    """File to which the store appends identity and parent of every block that it has published."""
    max_pool_blocks: int = 0
    max_host_blocks: int = 0
    max_disk_blocks: int = 0
    announce_protocol: int = 0
    """What services and `perdure restart` claim to speak; 0: the truth."""
    announce_state: int = 0


class BenchConfig(Section, frozen=True):
    """Switches of the benchmark, which `perdure serve` refuses."""

    durable: bool = True
    """False: no journal, no ledger, nothing is saved to the store."""


class Config(Section, frozen=True):
    """The whole configuration."""

    model: ModelConfig = ModelConfig()
    kv: KVConfig = KVConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    store: StoreConfig = StoreConfig()
    front: FrontConfig = FrontConfig()
    ledger: LedgerConfig = LedgerConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    faults: FaultsConfig = FaultsConfig()
    bench: BenchConfig = BenchConfig()


_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 1000, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Reads a size such as `1.5 GiB` into bytes; ConfigError with the known units otherwise."""
    match = _SIZE.fullmatch(text)
    unit = match.group(2).lower() if match else "?"
    if match is None or unit not in _UNITS:
        raise ConfigError(f"{text!r} is no size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    if len(match.group(1)) > MAX_SIZE_DIGITS:
        raise ConfigError(f"{text[:40]}... is no size: {len(match.group(1))} digits, {MAX_SIZE_DIGITS} are enough")
    return int(float(match.group(1)) * _UNITS[unit])


def _unknown(what: str, name: str, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(known))}"
    return ConfigError(f"unknown {what} {name!r}{hint}")


def _section_types() -> dict[str, type[Section]]:
    return {field.name: field.type for field in msgspec.structs.fields(Config)}


def _checked(raw: Mapping[str, Any]) -> Config:
    tidy: dict[str, dict[str, Any]] = {}
    sections = _section_types()
    for section, values in raw.items():
        if section not in sections:
            raise _unknown("section", section, list(sections))
        if not isinstance(values, Mapping):
            raise ConfigError(f"{section} is a section; write [{section}] and its keys below")
        fields = {field.name: field.type for field in msgspec.structs.fields(sections[section])}
        tidy[section] = {}
        for name, value in values.items():
            if name not in fields:
                raise _unknown(f"key in [{section}]", name, list(fields))
            if isinstance(value, str) and name.endswith("_bytes"):
                value = parse_size(value)
            tidy[section][name] = value
    try:
        return msgspec.convert(tidy, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def load_config(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Reads `path` (or PERDURE_CONFIG, or ./perdure.toml when it exists), then the environment over it."""
    environ = os.environ if environ is None else environ
    if path is None:
        given = environ.get("PERDURE_CONFIG")
        path = Path(given) if given else Path("perdure.toml")
        if not given and not path.exists():
            path = None
    raw: dict[str, dict[str, Any]] = {}
    if path is not None:
        try:
            raw = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"configuration {path} can't be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:  # TOML, UTF-8, and a number of thousands of digits
            raise ConfigError(f"configuration {path} is no TOML: {error}") from error
    for name, value in sorted(environ.items()):
        if name.startswith("PERDURE_") and "__" in name:
            if not f"{name}{value}".isprintable() and any("\ud800" <= char <= "\udfff" for char in name + value):
                raise ConfigError(f"environment variable {name!a} is no UTF-8")
            section, _, key = name.removeprefix("PERDURE_").lower().partition("__")
            inner, _, hook = key.partition("__")
            if hook:  # PERDURE_FAULTS__HOOKS__STORE_BEFORE_INDEX=exit
                raw.setdefault(section, {}).setdefault(inner, {})[hook] = value
            else:
                raw.setdefault(section, {})[key] = value
    return _checked(raw)
