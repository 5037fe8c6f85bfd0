"""Configuration: strict, with the way out in every error."""

from pathlib import Path

import pytest

from shared.config import Config, ConfigError, load_config, parse_size
from shared.faults import Faults


def test_defaults_without_a_file() -> None:
    assert load_config(None, {}) == Config()


def test_file_then_environment(tmp_path: Path) -> None:
    path = tmp_path / "perdure.toml"
    path.write_text('[kv]\npool_bytes = "2 GiB"\ndtype = "bf16"\n')
    config = load_config(path, {"PERDURE_KV__DTYPE": "fp16", "PERDURE_SCHEDULER__STEP_TOKENS": "64"})
    assert config.kv.pool_bytes == 2 << 30
    assert config.kv.dtype == "fp16"
    assert config.scheduler.step_tokens == 64


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PERDURE_KV__POOL_BITES": "1"}, "did you mean pool_bytes"),
        ({"PERDURE_KVV__POOL_BYTES": "1"}, "did you mean kv"),
        ({"PERDURE_KV__POOL_BYTES": "much"}, "is no size"),
        ({"PERDURE_SCHEDULER__MAX_RUNNING": "x"}, "max_running"),
    ],
)
def test_mistakes_name_the_way_out(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, environ)


def test_a_broken_file_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "perdure.toml"
    for content in (b"[kv", b"\xff\xfe", b"kv = 3\n"):
        path.write_bytes(content)
        with pytest.raises(ConfigError):
            load_config(path, {})
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path / "absent.toml", {})


def test_sizes() -> None:
    assert parse_size("1.5 GiB") == 3 << 29
    assert parse_size("10MB") == 10_000_000
    assert parse_size("512") == 512


def test_unknown_fault_hooks_are_refused() -> None:
    config = load_config(None, {"PERDURE_FAULTS__HOOKS__STORE_AFTER_DATA": "fail:2"})
    faults = Faults(config.faults)
    assert faults.active
    faults.at("store_after_data")
    with pytest.raises(OSError, match="store_after_data"):
        faults.at("store_after_data")
    faults.at("store_after_data")
    with pytest.raises(ConfigError, match="unknown fault hook"):
        Faults(load_config(None, {"PERDURE_FAULTS__HOOKS__NO_SUCH_STEP": "exit"}).faults)
    with pytest.raises(ConfigError, match="none of exit"):
        Faults(load_config(None, {"PERDURE_FAULTS__HOOKS__STORE_AFTER_DATA": "explode"}).faults)
    assert not Faults(Config().faults).active
