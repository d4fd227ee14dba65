"""An engine whose lookup takes longer than it does: each stage ends with a wait. For benchmarks, which say so.

It stands for lookups of a size that the machine does not have (samples to read and parse, many more keys, slow memory):
the waits lie where the stages lie, so schedules hide them, or do not, as they would hide the work.
"""

import time
from collections.abc import Sequence

import torch

from nestrec.base.config import config
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, RoutedKeys, TableConfig, WorkingSet
from nestrec.embedding.routing.batch_overlap import Overlap
from nestrec.embedding.routing.deduplicated_keys import DeduplicatedKeys, FeatureKeys
from nestrec.embedding.routing.key_routing import RequestedKeys
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.embedding.routing.working_set import RowBuffers


@config
class Pace:
    """Milliseconds that are added to the stages of a lookup."""

    load_ms: float = 0.0
    """samples prefetched and brought to the device"""
    route_ms: float = 0.0
    """keys exchanged"""
    fetch_ms: float = 0.0
    """rows read"""
    write_back_ms: float = 0.0
    """rows written"""


class PacedEngine(EmbeddingEngine):
    """The tables, with waits."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        topology: Topology,
        pace: Pace,
        replica_sync: ReplicaSyncConfig | None = None,
    ) -> None:
        super().__init__(tables, topology, topology.device, replica_sync)
        self._pace = pace

    def deduplicate(self, *micro_batches: FeatureKeys, window_cache: bool = False) -> DeduplicatedKeys:
        found = super().deduplicate(*micro_batches, window_cache=window_cache)
        self._wait(self._pace.load_ms)
        return found

    def exchange_keys(self, source: DeduplicatedKeys, *, step: int = 0) -> RequestedKeys:
        asked = super().exchange_keys(source, step=step)
        self._wait(self._pace.route_ms)
        return asked

    def fetch(self, routed: RoutedKeys, *, step: int, buffers: RowBuffers | None = None) -> WorkingSet:
        working = super().fetch(routed, step=step, buffers=buffers)
        self._wait(self._pace.fetch_ms)
        return working

    def read_ahead(self, routed: RoutedKeys, *, step: int) -> WorkingSet:
        working = super().read_ahead(routed, step=step)
        self._wait(self._pace.fetch_ms)
        return working

    def write_back(self, working: WorkingSet, shared: Overlap | None = None) -> None:
        super().write_back(working, shared)
        self._wait(self._pace.write_back_ms)

    def _wait(self, duration_ms: float) -> None:
        """A lookup works on the host, on what the device has given it: so does this."""
        if duration_ms <= 0:
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        time.sleep(duration_ms * 1e-3)
