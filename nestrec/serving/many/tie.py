"""Instances end with their front, however that ends: each has one end of a pipe, and the front alone has the other.

Nothing is ever written. When the front is gone, even by SIGKILL, the system closes its end, and whoever reads is told.
"""

import contextlib
import os
import time

from nestrec.serving.api.process.signals import Signals
from nestrec.serving.background import BackgroundThread, guarded

_FRONT = "NESTREC_FRONT_PIPE"


class Tie:
    """The front's side."""

    def __init__(self) -> None:
        self.descriptor, self._held = os.pipe()
        """the end that instances inherit"""

    @property
    def environment(self) -> dict[str, str]:
        """What an instance finds its end by."""
        return {_FRONT: str(self.descriptor)}

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._held)


def end_with_front(signals: Signals, patience_s: float) -> None:
    """The instance's side: stop as by SIGTERM when the front is gone, and without more ado after `patience_s`."""
    given = os.environ.pop(_FRONT, None)
    if given is None:
        return
    descriptor = int(given)
    os.set_inheritable(descriptor, False)

    def watch() -> bool:
        with contextlib.suppress(OSError):  # a pipe that cannot be read does not show whether the front is alive
            while os.read(descriptor, 1):
                pass
        guarded("nestrec-front", signals.stop)
        time.sleep(patience_s)
        os._exit(1)

    BackgroundThread("nestrec-front", watch).start()
