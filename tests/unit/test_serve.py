"""What `perdure serve` hands on to the services."""

from pathlib import Path

import pytest

from ops.cli.serve import anchored
from shared.config import Config, ModelConfig


def test_relative_paths_mean_the_folder_where_the_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.gguf").touch()
    config = Config(model=ModelConfig(source="my.gguf", dir="models"))
    assert anchored(config) == {
        "PERDURE_MODEL__SOURCE": str(tmp_path / "my.gguf"),
        "PERDURE_MODEL__DIR": str(tmp_path / "models"),
    }


@pytest.mark.parametrize("source", ["smollm2-135m-instruct", "toy:1", "/some/model"])
def test_names_and_absolute_paths_stay_as_they_are(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert anchored(Config(model=ModelConfig(source=source, dir="/models"))) == {}
