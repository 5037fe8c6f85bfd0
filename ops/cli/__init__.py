"""`perdure`: one file a command. Exit codes: `ops.cli.exits`."""

import importlib
from typing import Any, ClassVar

import click

from ops.cli.pipes import quiet_when_nobody_reads


class _LazyGroup(click.Group):
    """Imports a command's module only when it is used, so that `perdure generate` starts quickly."""

    modules: ClassVar[dict[str, str]] = {
        "serve": "ops.cli.serve:serve",
        "generate": "ops.cli.generate:generate",
        "chat": "ops.cli.chat:chat",
        "status": "ops.cli.status:status",
        "restart": "ops.cli.restart:restart",
        "doctor": "ops.cli.doctor:doctor",
        "cache": "ops.cli.cache:cache",
        "keys": "ops.cli.keys:keys",
        "ledger": "ops.cli.ledger:ledger",
        "models": "ops.cli.models:models",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.modules:
            return None
        module, _, attribute = self.modules[name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with quiet_when_nobody_reads():  # of --help and --version
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with quiet_when_nobody_reads():
            return super().invoke(ctx)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="perdure")
def main() -> None:
    """Perdure: an LLM inference engine whose KV cache outlives its processes.

    State lies under PERDURE_HOME; settings are read from perdure.toml and PERDURE_SECTION__KEY.
    """
