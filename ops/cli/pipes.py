"""Output that nobody reads any more (`perdure doctor | head`): the command ends without a word, as other tools do."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

READER_GONE = 141
"""Exit code: what a shell says of a tool that SIGPIPE ended. (The signal itself stays ignored: sockets need that.)"""


@contextmanager
def quiet_when_nobody_reads() -> Iterator[None]:
    """Ends the process with READER_GONE when writing fails because the other end of stdout or stderr was closed."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # or the interpreter would do it at exit, with a word
    except BaseException as error:
        if not _only_broken_pipes(error):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)  # what still lies in buffers goes there
        sys.exit(READER_GONE)


def _only_broken_pipes(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_only_broken_pipes(inner) for inner in error.exceptions)
    if isinstance(error, SystemExit) and error.__context__ is not None:  # rich's consoles end so
        return _only_broken_pipes(error.__context__)
    return isinstance(error, OSError) and error.errno == errno.EPIPE
