"""A stack that keeps no promise: no journal, no ledger, nothing saved. `perdure serve` refuses to be one.

As a program (`python -m ops.bench.bare_stack`) it is what `perdure serve` is, without that refusal.
"""

from ops.cli.exits import plain_errors
from ops.cli.serve import become_stack, check_platform
from ops.stack import Stack
from shared.config import load_config


class BareStack(Stack):
    """For the side without durability in a comparison."""

    entry = ("ops.bench.bare_stack",)

    def __init__(self, settings: dict[str, str]) -> None:
        super().__init__(settings | {"PERDURE_BENCH__DURABLE": "false"})


if __name__ == "__main__":
    with plain_errors():
        check_platform()
        become_stack(load_config())
