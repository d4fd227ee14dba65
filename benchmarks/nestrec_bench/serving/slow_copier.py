"""Copier of prefixes with an emulated link to host memory that is slower than the link of this machine."""

import time
from collections.abc import Callable

import torch

from nestrec.serving.kv_cache.tiered_prefix_cache import Copier


class SlowCopier(Copier):
    """Copier that waits after each copy until a link of the given speed would have transferred its bytes."""

    def __init__(self, device: torch.device, gb_per_s: float) -> None:
        super().__init__(device)
        self._gb_per_s = gb_per_s

    def _transfer(self, copy: Callable[[], None], num_bytes: int) -> None:
        start_s = time.perf_counter()
        super()._transfer(copy, num_bytes)
        time.sleep(max(0.0, start_s + num_bytes * 1e-9 / self._gb_per_s - time.perf_counter()))
