"""Topology, exchanges and dense gradient sums. Knows nothing of tables."""

from nestrec.distributed.collectives import GradientReducer
from nestrec.distributed.topology import Communicator, Topology

__all__ = ["Communicator", "GradientReducer", "Topology"]
