"""Distributed training: device mesh, collectives, transports and the all-reduce of dense gradients.

This package does not depend on embedding tables.
"""

from nestrec.distributed.collectives import GradientReducer
from nestrec.distributed.topology import Communicator, Topology

__all__ = ["Communicator", "GradientReducer", "Topology"]
