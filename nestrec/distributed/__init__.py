"""Topology, exchanges and dense gradient sums. Knows nothing of tables."""

from nestrec.distributed.collectives import DenseSync
from nestrec.distributed.topology import Communicator, Topology

__all__ = ["Communicator", "DenseSync", "Topology"]
