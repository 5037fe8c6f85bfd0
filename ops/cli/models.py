"""`perdure models`: the models that can be fetched, and fetching one."""

import click
from rich.console import Console
from rich.table import Table

from ops.cli.exits import FAULT, fail, plain_errors
from shared.config import load_config
from shared.paths import Places, default_home


@click.group()
def models() -> None:
    """Fetch and list models."""


@models.command()
@click.argument("name", default="smollm2-135m-instruct")
def pull(name: str) -> None:
    """Fetch NAME, checked by SHA-256; nothing is fetched when it is there."""
    from ops.models.download import pull as fetch
    from ops.models.progress import shown
    from shared.model.errors import ModelError

    with plain_errors():
        places = Places(default_home())
        places.make()
        try:
            with shown() as progress:
                path = fetch(name, places.models(load_config().model.dir), progress)
        except ModelError as error:
            fail(FAULT, str(error))
        click.echo(str(path))


@models.command("list")
def list_() -> None:
    """Show the known models and whether they are here."""
    from ops.models.download import present
    from ops.models.registry import MODELS

    directory = Places(default_home()).models(load_config().model.dir)
    table = Table()
    for column in ("name", "license", "size", "here"):
        table.add_column(column)
    for name, model in MODELS.items():
        here = "yes" if present(name, directory) else "no"
        table.add_row(name, model.license, f"{model.size / 1e6:.0f} MB", here)
    Console().print(table)
