"""Logs of a command: errors alone, on stderr. Services log everything; a command's stdout is for its answer."""

import logging
import sys

import structlog


def quiet_logs() -> None:
    """Call before the first line is logged."""
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer(key_order=["event"])],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )
