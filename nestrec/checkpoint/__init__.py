"""Checkpoints: manifests, files per shard, incremental and asynchronous saves, verification and mirroring."""

from nestrec.artifacts.writer_group import CheckpointGroup, CheckpointSaveError
from nestrec.checkpoint.checkpoint_content import Chunk, RankCheckpoint, join, split
from nestrec.checkpoint.checkpoint_manager import IDENTITY, CheckpointManager
from nestrec.checkpoint.checkpoint_manifest import verify
from nestrec.checkpoint.loaded_checkpoint import LoadedCheckpoint

__all__ = [
    "IDENTITY",
    "CheckpointGroup",
    "CheckpointManager",
    "CheckpointSaveError",
    "Chunk",
    "LoadedCheckpoint",
    "RankCheckpoint",
    "join",
    "split",
    "verify",
]
