"""Content of a checkpoint: dense tensors, JSON state and rows of embedding tables.

`split` and `join` convert nested state dictionaries to named tensors plus JSON and back, so that `torch.optim` states
need no pickle:

    tensors, skeleton = split("optimizer", optimizer.state_dict())
    optimizer.load_state_dict(join(skeleton, tensors))
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from nestrec.base.errors import NonFiniteError

Chunk = Mapping[str, torch.Tensor]
"""Some rows of a table: `keys` (n,) int64, and any other columns with n rows (`weight`, `state_*`, ...)."""


@runtime_checkable
class PriorityChunks(Protocol):
    """Chunks of a table, some of which can become urgent: they must be written before all others."""

    def __iter__(self) -> Iterator[Chunk]: ...

    def urgent_chunks(self) -> Iterator[Chunk]:
        """Yield the chunks that must be written now; iteration does not yield them again."""
        ...


def _do_nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCheckpoint:
    """Part of a checkpoint that one rank writes.

    `tensors` and `state` are the same on all ranks, and rank 0 writes them. `tables` differ, and every rank writes its
    own rows; of several replicas of a shard, all but one leave `tables` empty.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Dense weights and optimizer states by name."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """JSON-compatible values: position in the data, decisions, metric state. Tuples are restored as lists."""
    tables: Mapping[str, Iterable[Chunk]] = field(default_factory=dict)
    """Rows of this rank's shard of each table, in chunks (one file per chunk; 16 to 256 MiB per chunk work well)."""
    removed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Keys removed from each table since `base`; a key that was added again is also in `tables`."""
    base: int | None = None
    """Step of the checkpoint since which `tables` contain only the touched rows; None: `tables` contain all rows. See
    `CheckpointManager.next_base_step`.
    """
    shard: tuple[int, int] | None = None
    """Index of this rank's shard and number of shards; None: rank and number of ranks."""
    close: Callable[[], None] = _do_nothing
    """Function that is called when the content has been read."""

    def copy(self) -> "RankCheckpoint":
        """Return a copy of the content in host memory, which later training steps do not change."""
        return replace(
            self,
            tensors=_copy(self.tensors),
            tables={name: [_copy(chunk) for chunk in chunks] for name, chunks in self.tables.items()},
            removed=_copy(self.removed),
        )


def chunks_of(tables: Mapping[str, Iterable[Chunk]]) -> Iterator[tuple[str, Chunk]]:
    """Yield (table, chunk) table by table; after each chunk, also the urgent chunks of all tables."""
    priority_tables = {table: chunks for table, chunks in tables.items() if isinstance(chunks, PriorityChunks)}
    for table, chunks in tables.items():
        for chunk in chunks:
            yield table, chunk
            for other, other_chunks in priority_tables.items():
                yield from ((other, chunk) for chunk in other_chunks.urgent_chunks())


def parts_of(tensors: Mapping[str, torch.Tensor], part_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Split tensors into parts of about `part_bytes`; no tensor is divided."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        tensor_bytes = tensor.numel() * tensor.element_size()
        if part and size + tensor_bytes > part_bytes:
            yield part
            part = {}
            size = 0
        part[name] = tensor
        size += tensor_bytes
    if part:
        yield part


def check_chunk(table: str, chunk: Chunk) -> None:
    keys = chunk["keys"]
    assert (keys.dtype, keys.dim()) == (torch.int64, 1), f"keys of table {table} must be (n,) int64"
    wrong = [name for name, column in chunk.items() if column.shape[:1] != keys.shape]
    assert not wrong, f"columns {wrong} of table {table} differ from its keys in their number of rows"


def check_finite(what: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise a NonFiniteError if a tensor contains a NaN or infinity, from which training could not be resumed."""
    for name, tensor in tensors.items():
        # A sum is many times faster than a check of each number; if it overflows, the exact check follows.
        if not tensor.is_floating_point() or math.isfinite(_sum(tensor)) or bool(tensor.isfinite().all()):
            continue
        rows = (~tensor.isfinite()).reshape(len(tensor), -1).any(1) if tensor.dim() else ~tensor.isfinite()
        raise NonFiniteError(f"{int(rows.sum()):,} rows of {what} are not finite ({name})")


def _sum(tensor: torch.Tensor) -> float:
    """Return the sum of a tensor, computed by the calling thread alone if NumPy supports the dtype.

    PyTorch would use threads that a concurrent training step needs.
    """
    if tensor.device.type != "cpu" or tensor.dtype == torch.bfloat16:
        return float(tensor.sum())
    with np.errstate(all="ignore"):
        return float(tensor.detach().numpy().sum())


def _copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def split(name: str, tree: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Convert a tree to tensors, named by their path below `name`, and a JSON-compatible skeleton for `join`.

    The tree consists of dictionaries (with strings, integers or other JSON values as keys), lists, tuples, tensors and
    JSON values.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _split(name, tree, tensors)


def join(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tree that `split` has converted."""
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, content),) = skeleton.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: join(value, tensors) for key, value in content}
    items = [join(value, tensors) for value in content]
    return tuple(items) if kind == "tuple" else items


def _split(path: str, tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors[path] = tree
        return {"tensor": path}
    if isinstance(tree, Mapping):
        return {"dict": [[key, _split(f"{path}/{key}", value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [_split(f"{path}/{index}", value, tensors) for index, value in enumerate(tree)]}
    assert tree is None or isinstance(tree, bool | int | float | str), f"{path}: {type(tree)} cannot be saved"
    return tree
