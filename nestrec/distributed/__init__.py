"""Topology, exchanges and dense gradient sums. Knows nothing of tables."""

from nestrec.distributed.dense_sync import DenseSync
from nestrec.distributed.topology import CollectiveLog, Communicator, Topology

__all__ = ["CollectiveLog", "Communicator", "DenseSync", "Topology"]
