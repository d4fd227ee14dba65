"""What a run has come to, as text that two runs can be compared by: every tensor, every table, and where it stands."""

import hashlib
from pathlib import Path

import torch

from nestrec.checkpoint import Checkpoints, Restored
from nestrec.training.state import TrainState


def run_digest(run: Path) -> dict[str, str]:
    """Name to digest of every dense weight, optimiser state and table, and of the consumed samples."""
    restored = Checkpoints(run / "checkpoints").restore_latest()
    assert restored is not None, f"{run} has no checkpoint"
    state = TrainState.from_plain(restored.state["train"])
    tensors = {f"tensor {name}": _digest(tensor) for name, tensor in restored.tensors.items()}
    tables = {f"table {name}": _table_digest(restored, name) for name in restored.tables}
    return {**tensors, **tables, "consumed": state.consumed, "state": repr(state)}


def _table_digest(restored: Restored, table: str) -> str:
    chunks = list(restored.rows(table))
    if not chunks:
        return "empty"
    columns = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    order = columns["keys"].argsort()
    assert len(columns["keys"].unique()) == len(order), "a key comes twice"
    return " ".join(f"{name}:{_digest(columns[name][order])}" for name in sorted(columns))


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
