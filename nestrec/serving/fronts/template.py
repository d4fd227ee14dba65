"""The process that fronts are forked from: it has imported everything, and does nothing else.

Importing takes seconds and most of a front's memory; a fork has both at once. The process that computes cannot be
forked itself: it has threads, and a device.
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from nestrec.serving.safety import front_secret

_LOG = logging.getLogger(__name__)
_MOST_SOCKETS = 64


class Template:
    """The side of whoever wants fronts; the process is started again where it is gone. `close` ends it, not them."""

    def __init__(self) -> None:
        self._start()

    def spawn(self, sockets: Sequence[socket.socket]) -> None:
        """A front that has these sockets (`run_front`, in that order); they can be closed here afterwards."""
        descriptors = [one.fileno() for one in sockets]
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                socket.send_fds(self._control, [b"f"], descriptors)
                return
        self.close()
        self._start()
        socket.send_fds(self._control, [b"f"], descriptors)

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "nestrec.serving.fronts.template", str(theirs.fileno())]
        environment = {**os.environ, front_secret.VARIABLE: front_secret.front_secret()}
        # A group of its own: Ctrl-C is for the process that computes, which then stops its fronts in order.
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], process_group=0)
        theirs.close()


def _run(control: socket.socket) -> None:
    from nestrec.serving.api.protocol.long_lists import warm_up
    from nestrec.serving.fronts.front_process import run_front
    from nestrec.serving.safety.shared_rates import SharedKeyRates

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a front has ended: its sockets tell that it has
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    front_secret.front_secret()
    warm_up()
    rates = SharedKeyRates()
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, _MOST_SOCKETS)
        if not data:
            rates.close()
            return
        if os.fork() == 0:
            code = 1
            try:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control, quick, *sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
                run_front(control, quick, sockets, rates)
                code = 0
            except EOFError:
                code = 0
            except BaseException:
                _LOG.exception("a front failed")
            finally:
                os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    _run(socket.socket(fileno=int(sys.argv[1])))
