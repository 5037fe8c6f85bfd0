"""`python -m ops.supervise NAME`."""

import sys

import structlog
from setproctitle import setproctitle

from ops.supervise.fork import hold_signals
from ops.supervise.supervisor import Supervisor
from shared.actor import configure_logging
from shared.config import ConfigError, load_config
from shared.paths import PlaceError, Places, default_home
from shared.welcome import SERVICES


def main() -> int:
    """Exit codes: 0 planned stop, 1 crash loop, 2 usage or configuration, 4 taken."""
    hold_signals()
    configure_logging()
    log = structlog.get_logger(role="supervise")
    if len(sys.argv) != 2 or sys.argv[1] not in SERVICES:
        log.error("usage", hint=f"python -m ops.supervise NAME, with NAME one of {', '.join(sorted(SERVICES))}")
        return 2
    try:
        config = load_config()
        places = Places(default_home())
        places.make()
        supervisor = Supervisor(sys.argv[1], places, config)
    except ConfigError as error:
        log.error("cannot_start", service=sys.argv[1], reason=str(error))
        return 2
    except PlaceError as error:
        log.error("cannot_start", service=sys.argv[1], reason=str(error))
        return 4
    setproctitle(f"perdure supervise {sys.argv[1]}")
    return supervisor.run()


sys.exit(main())
