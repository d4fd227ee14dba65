"""Jobs that ranks run in the tests of checkpoints."""

import os

import numpy as np
import torch

from nestrec.base.errors import PeerLostError
from nestrec.checkpoint import CheckpointGroup, CheckpointManager, RankCheckpoint
from nestrec.distributed import Topology
from nestrec.embedding.hashing import owner_of
from support.checkpoint_contents import make_rows

NUM_KEYS, LAST_STEP = 200, 4


def open_checkpoints(topology: Topology, folder: str) -> tuple[CheckpointManager, list[int]]:
    """Return the checkpoint manager of all ranks, and the keys of this rank."""
    peers = CheckpointGroup.of_topology(topology, timeout_s=60)
    own_keys = np.flatnonzero(owner_of(np.arange(NUM_KEYS), topology.world) == topology.rank).tolist()
    return CheckpointManager(folder, peers=peers, max_deltas=2), own_keys


def save_chain(topology: Topology, folder: str) -> None:
    """Save full and incremental checkpoints; all but the first are saved in the background."""
    checkpoints, own_keys = open_checkpoints(topology, folder)
    for step in range(LAST_STEP + 1):
        base = checkpoints.next_base_step()
        touched = own_keys if base is None else [key for key in own_keys if key % 5 == step]
        content = RankCheckpoint(state={"step": step}, tables={"items": [make_rows(touched, step)]}, base=base)
        if step:
            checkpoints.save_async(step, content)
        else:
            checkpoints.save(step, content)
    checkpoints.close()


def load_chain(topology: Topology, folder: str) -> tuple[dict[int, float], dict[str, int]]:
    """Load the latest checkpoint; return the first weight of each key of this rank, and the saved state."""
    checkpoints, own_keys = open_checkpoints(topology, folder)
    restored = checkpoints.restore_latest()
    assert restored is not None
    shard = topology.rank, topology.world

    def owned(keys: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(owner_of(keys.numpy(), topology.world) == topology.rank)

    weights: dict[int, float] = {}
    for chunk in restored.rows("items", shard=shard, owned=owned):
        weights |= dict(zip(chunk["keys"].tolist(), chunk["weight"][:, 0].tolist(), strict=True))
    assert sorted(weights) == own_keys
    return weights, dict(restored.state)


def lose_a_peer(topology: Topology, folder: str) -> str:
    """Exit rank 1 after the first save, and return the name of the error of the second save on the other ranks."""
    checkpoints, own_keys = open_checkpoints(topology, folder)
    checkpoints.save(1, RankCheckpoint(tables={"items": [make_rows(own_keys, 1)]}))
    if topology.rank == 1:
        os._exit(9)
    try:
        checkpoints.save(2, RankCheckpoint(tables={"items": [make_rows(own_keys, 2)]}))
    except PeerLostError as error:
        return type(error).__name__
    return "saved"
