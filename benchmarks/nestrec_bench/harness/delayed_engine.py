"""Embedding engine whose lookup stages are extended by waits. Benchmarks mark figures measured with it as emulated.

The waits emulate larger lookups than the machine has (samples to read and parse, many more keys, slow memory). They
occur at the end of the stages, so that a schedule hides a wait exactly if it would hide the work.
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
    """Waiting times that are added to the stages of a lookup, in milliseconds."""

    load_ms: float = 0.0
    """Time added to prefetching samples and copying them to the device."""
    route_ms: float = 0.0
    """Time added to exchanging keys."""
    fetch_ms: float = 0.0
    """Time added to reading rows."""
    write_back_ms: float = 0.0
    """Time added to writing rows."""


class PacedEngine(EmbeddingEngine):
    """Embedding engine that waits at the end of each lookup stage."""

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
        requested = super().exchange_keys(source, step=step)
        self._wait(self._pace.route_ms)
        return requested

    def fetch_rows(self, routed: RoutedKeys, *, step: int, buffers: RowBuffers | None = None) -> WorkingSet:
        working = super().fetch_rows(routed, step=step, buffers=buffers)
        self._wait(self._pace.fetch_ms)
        return working

    def prefetch_rows(self, routed: RoutedKeys, *, step: int) -> WorkingSet:
        working = super().prefetch_rows(routed, step=step)
        self._wait(self._pace.fetch_ms)
        return working

    def write_back(self, working: WorkingSet, shared: Overlap | None = None) -> None:
        super().write_back(working, shared)
        self._wait(self._pace.write_back_ms)

    def _wait(self, duration_ms: float) -> None:
        """Wait on the host, after the work of the device, as a real lookup would."""
        if duration_ms <= 0:
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        time.sleep(duration_ms * 1e-3)
