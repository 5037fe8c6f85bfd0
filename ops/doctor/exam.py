"""One examination: all checks in order, and a mending that is followed by another examination."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from ops.doctor.arena import check_arena
from ops.doctor.clock import check_clock
from ops.doctor.dead_arenas import check_dead_arenas
from ops.doctor.disk import check_disk
from ops.doctor.journal import check_journal
from ops.doctor.ledger import check_ledger
from ops.doctor.machine import check_machine
from ops.doctor.numbers import check_numbers
from ops.doctor.patient import Patient
from ops.doctor.places_check import check_places
from ops.doctor.report import Finding, Level, Report, fault, ok
from ops.doctor.running import Told, check_running
from shared.config import Config
from shared.paths import Lock, Places, private_dir
from shared.welcome import SERVICES

CHECKS: tuple[Callable[[Patient], list[Finding]], ...] = (
    check_places,
    check_machine,
    check_clock,
    check_arena,
    check_disk,
    check_numbers,
    check_journal,
    check_ledger,
)


def examine(
    places: Places,
    config: Config,
    *,
    quick: bool = False,
    told: Told | None = None,
    remove_dead_arenas: bool = False,
) -> Report:
    """Looks at everything that a home keeps; changes nothing. Blocks on IO: in a service, call it in a thread.

    `quick`: payloads are not read. `told`: what the services say of themselves (`running.ask`). `remove_dead_arenas`:
    arenas that do not say whose they are get a mend, too. Whatever lies there becomes a finding, never an exception.
    """
    return _examine(Patient(places, config, quick=quick), told or Told(), remove_dead_arenas)


def _examine(patient: Patient, told: Told, remove_dead_arenas: bool) -> Report:
    began = time.monotonic()
    home = patient.places.home
    report = Report(str(home))
    if not home.is_dir():
        report.findings.append(ok("home", f"there is no home at {home}; `perdure serve` makes one"))
        return report
    checks: list[Callable[[Patient], list[Finding]]] = [
        *CHECKS,
        partial(check_dead_arenas, unknown_too=remove_dead_arenas),
        lambda patient: check_running(told),
    ]
    for check in checks:
        try:
            report.findings += check(patient)
        except OSError as error:
            text = f"a check could not look: {error}"
            report.findings.append(fault("unreadable", text, "make the home readable for the user who runs the stack"))
    report.seconds = time.monotonic() - began
    return report


@contextmanager
def alone(places: Places) -> Iterator[None]:
    """The home for ourselves; Taken when a stack or one of its services runs on it."""
    with ExitStack() as held:
        for path, what in (
            (places.lock, f"the stack on {places.home}"),
            *((places.run / f"{role}.lock", f"the {role} of {places.home}") for role in sorted(SERVICES)),
        ):
            held.callback(Lock(path, what).release)
        yield


def repair(places: Places, config: Config, *, quick: bool = False, remove_dead_arenas: bool = False) -> Report:
    """Examines, mends what has a mend, and examines again: the second report, with what was done.

    Taken when a stack runs: nothing is mended under it.
    """
    if not places.home.is_dir():
        return examine(places, config)
    private_dir(places.run)
    with alone(places):
        first = _examine(Patient(places, config, quick=quick, alone=True), Told(), remove_dead_arenas)
        done = [_mended(finding) for finding in first.at_least(Level.NOTE) if finding.mend is not None]
        second = _examine(Patient(places, config, quick=quick, alone=True), Told(), remove_dead_arenas)
    second.mended = done
    return second


def _mended(finding: Finding) -> str:
    assert finding.mend is not None
    try:
        return f"{finding.name}: {finding.mend()}"
    except Exception as error:  # the other findings deserve their chance; the second examination tells this one again
        return f"{finding.name}: not mended: {error}"


__all__ = ["alone", "examine", "repair"]
