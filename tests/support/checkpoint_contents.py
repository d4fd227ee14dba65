"""Contents to save and compare in checkpoint tests."""

from collections.abc import Iterable

import torch

from nestrec.checkpoint import CheckpointManager, Chunk, LoadedCheckpoint, RankCheckpoint


def make_rows(keys: Iterable[int], value: float, dim: int = 4) -> Chunk:
    key_list = list(keys)
    column = torch.tensor(key_list, dtype=torch.float32)[:, None] + value
    return {
        "keys": torch.tensor(key_list, dtype=torch.int64),
        "weight": column.expand(-1, dim).contiguous(),
        "state_sum": column.reshape(-1) * 2,
    }


def make_content(step: int, *, num_chunks: int = 3, rows_per_chunk: int = 5) -> RankCheckpoint:
    generator = torch.Generator().manual_seed(step)
    chunks = [
        make_rows(range(part * rows_per_chunk, (part + 1) * rows_per_chunk), float(step)) for part in range(num_chunks)
    ]
    return RankCheckpoint(
        tensors={
            "model/weight": torch.randn(7, 3, generator=generator),
            "model/mask": torch.tensor([True, False, True]),
            "optimizer/step": torch.tensor(float(step), dtype=torch.float64),
            "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        },
        state={"step": step, "order": {"epoch": 1, "position": step * 8}, "rng": 2**64 - 1},
        tables={"items": chunks, "users/long name": []},
    )


def values_of(restored: LoadedCheckpoint, table: str) -> dict[int, tuple[float, ...]]:
    """Return the weights and the state of all rows by key, and fail if a key occurs twice."""
    rows: dict[int, tuple[float, ...]] = {}
    for chunk in restored.rows(table):
        for index, key in enumerate(chunk["keys"].tolist()):
            assert key not in rows
            rows[key] = (*chunk["weight"][index].tolist(), float(chunk["state_sum"][index]))
    return rows


def table_values(chunks: Iterable[Chunk]) -> dict[int, tuple[float, ...]]:
    return {
        key: (*chunk["weight"][index].tolist(), float(chunk["state_sum"][index]))
        for chunk in chunks
        for index, key in enumerate(chunk["keys"].tolist())
    }


def assert_same(restored: LoadedCheckpoint, content: RankCheckpoint) -> None:
    assert dict(restored.state) == dict(content.state)
    assert set(restored.tensors) == set(content.tensors)
    for name, tensor in content.tensors.items():
        assert restored.tensors[name].dtype == tensor.dtype
        assert torch.equal(restored.tensors[name], tensor)
    assert set(restored.tables) == set(content.tables)
    for table, chunks in content.tables.items():
        assert values_of(restored, table) == table_values(chunks)


def save_steps(folder: str, method: str) -> None:
    """Save the steps after the latest checkpoint up to step 4, by the named method, and retain one checkpoint."""
    checkpoints = CheckpointManager(folder, keep=1)
    restored = checkpoints.restore_latest()
    for step in range(restored.step + 1 if restored else 1, 5):
        getattr(checkpoints, method)(step, make_content(step))
    checkpoints.close()
