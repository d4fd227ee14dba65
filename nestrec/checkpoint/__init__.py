"""Checkpoints: manifest, shards, incremental and asynchronous saves, verification, export."""

from nestrec.artifacts.writer_group import Peers, SaveError
from nestrec.checkpoint.checkpoint_content import Chunk, Content, join, split
from nestrec.checkpoint.checkpoint_manager import IDENTITY, Checkpoints
from nestrec.checkpoint.checkpoint_manifest import verify
from nestrec.checkpoint.loaded_checkpoint import Restored

__all__ = ["IDENTITY", "Checkpoints", "Chunk", "Content", "Peers", "Restored", "SaveError", "join", "split", "verify"]
