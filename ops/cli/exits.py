"""Exit codes of the command line, and how an error becomes one line and a code."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ops.cli.logs import quiet_logs
from shared.config import ConfigError
from shared.model.errors import ModelError
from shared.paths import PlaceError

OK, FAULT, USAGE, REJECTED, NO_STACK, DEADLINE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130


def fail(code: int, text: str) -> None:
    """Says `text` on stderr and ends with `code`."""
    click.echo(f"perdure: {text}", err=True)
    sys.exit(code)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns our own errors into one line and the right exit code; keeps logs off the answer."""
    quiet_logs()
    try:
        yield
    except ConfigError as error:
        fail(USAGE, str(error))
    except PlaceError as error:
        fail(NO_STACK, str(error))
    except ModelError as error:
        fail(FAULT, str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
