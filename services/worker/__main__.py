"""`python -m services.worker`: the worker of one home."""

from contextlib import suppress

from services.worker.actor import Worker
from services.worker.openmp import settle_openmp
from shared.actor import run


def preload() -> None:
    """What a supervisor imports in advance, beside this module: all that a model on the CPU kernels needs."""
    import services.worker.model_runner  # noqa: F401
    from kernels.cpu.library import NoLibrary, library

    with suppress(NoLibrary):  # the worker will say so
        library()


def main() -> None:
    """Its life."""
    settle_openmp()
    run(Worker)


if __name__ == "__main__":
    main()
