"""Processes of a server with frontend workers, found through the operating system."""

import contextlib
import time
from pathlib import Path

import psutil

NUM_WORKERS = 2


def workers_of(process):
    """Wait until all frontend workers listen, and return their processes.

    They are grandchildren of the server: it starts one child, from which they are forked.
    """
    found = []

    def all_listen():
        found[:] = [worker for child in children_of(process) for worker in children_of(child)]
        return len(found) == NUM_WORKERS and all(listens(worker) for worker in found)

    wait_for(all_listen)
    return found


def children_of(process):
    """Return the child processes from /proc.

    `psutil.Process.children` reads all processes of the machine and fails if one of them exits meanwhile.
    """
    found = []
    for listed in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError, psutil.Error):
            found += [psutil.Process(int(pid)) for pid in listed.read_text().split()]
    return found


def listens(process):
    with contextlib.suppress(psutil.Error):
        return any(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("tcp"))
    return False


def is_connected(process):
    return any(connection.status == psutil.CONN_ESTABLISHED for connection in process.net_connections("tcp"))


def wait_for(condition, timeout_s=120.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)  # the condition depends on another process: there is no clock to inject
