"""Processes of a server with fronts, as the system lists them."""

import contextlib
import time
from pathlib import Path

import psutil

NUM_FRONTS = 2


def fronts_of(process):
    """All of them, once they listen: forked by the one child that has been started."""
    found = []

    def do_listen():
        found[:] = [one for child in children_of(process) for one in children_of(child)]
        return len(found) == NUM_FRONTS and all(listens(one) for one in found)

    wait_for(do_listen)
    return found


def children_of(process):
    """As the system lists them: psutil looks through all processes of the machine, of which one may end meanwhile."""
    found = []
    for listed in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError, psutil.Error):
            found += [psutil.Process(int(pid)) for pid in listed.read_text().split()]
    return found


def listens(process):
    with contextlib.suppress(psutil.Error):
        return any(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))
    return False


def is_asked(process):
    return any(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections("tcp"))


def wait_for(condition, timeout_s=120.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)  # another process changes: there is no clock to inject
