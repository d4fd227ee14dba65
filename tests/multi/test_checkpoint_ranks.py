"""Checkpoints written and read by real processes over Gloo."""

import subprocess
import sys
from pathlib import Path

PREPARE = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from nestrec.base.random import mix64
from nestrec.checkpoint import Checkpoints, Content, Peers
from nestrec.distributed import Topology
from nestrec.testing.contents import make_rows
folder, store, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
limit = timedelta(seconds=30)
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world, timeout=limit)
peers = Peers.of_topology(Topology.of_process_group(torch.device("cpu"), timeout_s=30), timeout_s=10)
checkpoints = Checkpoints(folder, peers=peers, max_deltas=2)
mine = [key for key in range(200) if mix64(key) % world == rank]
"""

SAVE = (
    PREPARE
    + """
for step in range(5):
    base = checkpoints.base_for_next()
    touched = mine if base is None else [key for key in mine if key % 5 == step]
    content = Content(state={"step": step}, tables={"items": [make_rows(touched, step)]}, base=base)
    checkpoints.save_async(step, content) if step else checkpoints.save(step, content)
checkpoints.close()
dist.destroy_process_group()
"""
)

LOAD = (
    PREPARE
    + """
restored = checkpoints.restore_latest()
owned = lambda keys: torch.tensor([mix64(key) % world == rank for key in keys.tolist()])
found = {}
for chunk in restored.rows("items", shard=(rank, world), owned=owned):
    found |= dict(zip(chunk["keys"].tolist(), chunk["weight"][:, 0].tolist(), strict=True))
assert restored.state == {"step": 4}
assert found == {key: key + key % 5 for key in mine}, found
dist.destroy_process_group()
"""
)

LOSE_A_PEER = (
    PREPARE
    + """
from nestrec.base.errors import PeerLostError
checkpoints.save(1, Content(tables={"items": [make_rows(mine, 1)]}))
if rank == 1:
    os._exit(9)
try:
    checkpoints.save(2, Content(tables={"items": [make_rows(mine, 2)]}))
except PeerLostError:
    os._exit(3)
"""
)


def run(code: str, folder: Path, world: int, name: str) -> list[int]:
    """Exit codes of `world` processes running the code."""
    store = folder / f"{name}.store"
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(folder / "checkpoints"), str(store), str(rank), str(world)])
        for rank in range(world)
    ]
    return [rank.wait(timeout=60) for rank in ranks]


def test_a_chain_saved_by_4_processes_loads_on_4_and_2(tmp_path: Path) -> None:
    assert run(SAVE, tmp_path, 4, "save") == [0] * 4
    assert run(LOAD, tmp_path, 4, "load4") == [0] * 4
    assert run(LOAD, tmp_path, 2, "load2") == [0] * 2


def test_a_peer_that_dies_is_an_error_on_the_others_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    assert run(LOSE_A_PEER, tmp_path, 3, "lose") == [3, 9, 3]
    whole = [path.name for path in (tmp_path / "checkpoints").iterdir() if not path.name.endswith(".partial")]
    assert whole == ["step-00000001"]
