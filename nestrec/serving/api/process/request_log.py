"""A line for each answer, where they are asked for."""

import logging
import time

from nestrec.serving.api.protocol.incoming import Incoming

_LOG = logging.getLogger("nestrec.requests")


def log_answer(incoming: Incoming, status: int) -> None:
    """route: as it is declared, so without the id of a user in it."""
    fields = {
        "request_id": incoming.id,
        "route": incoming.route,
        "status": status,
        "milliseconds": round((time.perf_counter() - incoming.came_s) * 1e3, 2),
    }
    _LOG.info("answered", extra={"fields": fields | ({"key": incoming.key} if incoming.key else {})})


def log_answer_to_front(incoming: Incoming, status: int) -> None:
    """Log an answer of an instance, unless its front has checked its health, which it does several times per second."""
    if not incoming.route.startswith("/health/"):
        log_answer(incoming, status)
