"""Checkpoints: manifest, shards, incremental and asynchronous saves, verification, export."""

from nestrec.checkpoint.checkpoints import IDENTITY, Checkpoints
from nestrec.checkpoint.content import Chunk, Content
from nestrec.checkpoint.peers import Peers, SaveError
from nestrec.checkpoint.restored import Restored
from nestrec.checkpoint.tree import join, split
from nestrec.checkpoint.verify import verify

__all__ = ["IDENTITY", "Checkpoints", "Chunk", "Content", "Peers", "Restored", "SaveError", "join", "split", "verify"]
