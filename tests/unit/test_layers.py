"""The layering of design section 5, enforced."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = {"services", "shared", "kernels", "ops", "tests"}
PURE = [
    "services/scheduler/engine.py",
    "services/scheduler/batch.py",
    "services/scheduler/policy.py",
    "services/scheduler/request.py",
    "services/scheduler/events.py",
    "services/scheduler/records.py",
    "services/scheduler/breaker.py",
    "services/scheduler/counters.py",
    "services/scheduler/desk.py",
    "services/scheduler/grants.py",
    "services/scheduler/limits.py",
    "services/scheduler/loading.py",
    "services/scheduler/recovery.py",
    "services/scheduler/residence.py",
    "services/scheduler/saving.py",
    "services/scheduler/settings.py",
    "services/scheduler/steps.py",
    "services/scheduler/timers.py",
    "services/scheduler/told.py",
    "services/scheduler/kv",
    "services/scheduler/feed.py",
    "services/scheduler/journal_fold.py",
    "services/store/arena/headers.py",
    "services/store/arena/records.py",
    "services/store/catalog",
    "services/detokenizer/output.py",
    "services/detokenizer/requests.py",
    "services/detokenizer/stops.py",
    "services/detokenizer/text.py",
    "services/tokenizer/validate.py",
    "ops/supervise/policy.py",
]
IMPURE = {"trio", "zmq", "torch", "lmdb", "time", "random", "secrets", "sqlite_utils", "socket", "subprocess"}


def sources(*tops: str) -> list[Path]:
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def allowed(path: Path) -> set[str]:
    parts = path.relative_to(ROOT).parts
    if parts[0] == "shared":
        return {"shared"}
    if parts[0] == "kernels":
        return {"kernels", "shared"}
    if parts[0] == "services":
        own = f"services.{parts[1]}" if len(parts) > 2 else "services"
        return {"shared", own} | ({"kernels"} if parts[1] == "worker" else set())
    return PROJECT - {"tests"}


@pytest.mark.parametrize("path", sources("shared", "kernels", "services", "ops"), ids=str)
def test_imports_respect_the_layers(path: Path) -> None:
    for name in imported(path):
        if name.split(".")[0] in PROJECT:
            assert any(name == room or name.startswith(f"{room}.") for room in allowed(path)), (
                f"{path.relative_to(ROOT)} imports {name}"
            )


def test_pure_cores_import_nothing_impure() -> None:
    for entry in PURE:
        files = sources(entry) if (ROOT / entry).is_dir() else [ROOT / entry]
        assert files, entry
        for path in files:
            assert not {name.split(".")[0] for name in imported(path)} & IMPURE, path.relative_to(ROOT)


def test_no_pickle_anywhere() -> None:
    for path in sources("shared", "kernels", "services", "ops"):
        assert not {name.split(".")[0] for name in imported(path)} & {"pickle", "marshal", "shelve"}, path


def test_the_rule_itself_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from services.store import catalog\n")
    assert imported(bad) == {"services.store"}
    assert "services.store" not in allowed(ROOT / "services" / "worker" / "x.py")


def test_files_stay_readable() -> None:
    for path in sources("shared", "kernels", "services", "ops"):
        assert len(path.read_text().splitlines()) <= 400, f"{path.relative_to(ROOT)}: split before adding"
