"""A copier of prefixes whose link to host memory is slower than this machine's own."""

import time
from collections.abc import Callable

import torch

from nestrec.serving.kv_cache.tiered_prefix_cache import Copier


class SlowCopier(Copier):
    """Makes each copy, then waits until a link of the given speed would have carried its bytes."""

    def __init__(self, device: torch.device, gb_per_s: float) -> None:
        super().__init__(device)
        self._gb_per_s = gb_per_s

    def _transfer(self, copy: Callable[[], None], num_bytes: int) -> None:
        start_s = time.perf_counter()
        super()._transfer(copy, num_bytes)
        time.sleep(max(0.0, start_s + num_bytes * 1e-9 / self._gb_per_s - time.perf_counter()))
