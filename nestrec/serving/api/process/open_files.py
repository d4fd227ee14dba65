"""Room for the connections that a server may have open: each is a file, and the usual limit of a shell is 1,024."""

import logging
import resource

_LOG = logging.getLogger(__name__)
_SPARE = 512
"""files beside connections: models, logs, pipes, those who are told to come back"""


def allow_open_files(max_connections: int) -> bool:
    """Raise this process's limit to what its connections need; whether it is enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _SPARE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return True
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    if reachable < wanted:
        _LOG.warning("only %d files may be open, too few for limits.max_connections: raise `ulimit -Hn`", reachable)
    return reachable >= wanted
