"""The content of a checkpoint: tensors, state and rows of tables.

What goes into a checkpoint.

Nested state dictionaries as tensors by name plus JSON, so that `torch.optim` state needs no pickle.

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
"""Some rows of a table: `keys` (n,) int64, and any other columns of n rows each (`weight`, `state_*`, ...)."""


@runtime_checkable
class PriorityChunks(Protocol):
    """Chunks of a table, some of which may have to be written before their turn, whatever else is being written."""

    def __iter__(self) -> Iterator[Chunk]: ...

    def due(self) -> Iterator[Chunk]:
        """Those that cannot wait now; iteration does not give them again."""
        ...


def _do_nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCheckpoint:
    """One rank's part of a checkpoint.

    `tensors` and `state` are the same on all ranks, and rank 0 writes its own; `tables` differ, and every rank writes
    what it is given (a replica that holds a copy gives nothing).
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Dense weights and optimiser states by name."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """JSON-like values: position, decisions, metric state. Tuples come back as lists."""
    tables: Mapping[str, Iterable[Chunk]] = field(default_factory=dict)
    """Rows of this rank's shard of each table, in chunks (one file each; 16 to 256 MiB is a good size)."""
    removed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Keys removed from each table since `base`; a key that came back is in `tables` as well."""
    base: int | None = None
    """Step of the checkpoint since which `tables` hold the touched rows; see `CheckpointManager.base_for_next`."""
    shard: tuple[int, int] | None = None
    """(index, number) of this rank's shard; (rank, number of ranks) where not given."""
    close: Callable[[], None] = _do_nothing
    """Called when nothing more is read of it."""

    def copied(self) -> "RankCheckpoint":
        """The same content in host memory of its own, safe from later training steps."""
        return replace(
            self,
            tensors=_copy(self.tensors),
            tables={name: [_copy(chunk) for chunk in chunks] for name, chunks in self.tables.items()},
            removed=_copy(self.removed),
        )


def chunks_of(tables: Mapping[str, Iterable[Chunk]]) -> Iterator[tuple[str, Chunk]]:
    """Table and chunk, table after table; after each chunk those of all tables that cannot wait."""
    hurried = {table: chunks for table, chunks in tables.items() if isinstance(chunks, PriorityChunks)}
    for table, chunks in tables.items():
        for chunk in chunks:
            yield table, chunk
            for other, of_other in hurried.items():
                yield from ((other, due) for due in of_other.due())


def parts_of(tensors: Mapping[str, torch.Tensor], part_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Split by name into parts of about `part_bytes`; no tensor is cut."""
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
    assert not wrong, f"columns {wrong} of table {table} have another number of rows than its keys"


def check_finite(what: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise a NonFiniteError for numbers that nobody could go on from."""
    for name, tensor in tensors.items():
        # A sum is many times quicker than a look at each number, and may at most suspect too much.
        if not tensor.is_floating_point() or math.isfinite(_sum(tensor)) or bool(tensor.isfinite().all()):
            continue
        rows = (~tensor.isfinite()).reshape(len(tensor), -1).any(1) if tensor.dim() else ~tensor.isfinite()
        raise NonFiniteError(f"{int(rows.sum()):,} rows of {what} are not finite ({name})")


def _sum(tensor: torch.Tensor) -> float:
    """By this thread alone where numpy knows the type: torch would take threads from a training that goes on."""
    if tensor.device.type != "cpu" or tensor.dtype == torch.bfloat16:
        return float(tensor.sum())
    with np.errstate(all="ignore"):
        return float(tensor.detach().numpy().sum())


def _copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def split(name: str, tree: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Tensors by path under `name`, and a JSON-like skeleton from which `join` rebuilds the tree.

    The tree is made of dictionaries (with text, integer or other JSON keys), lists, tuples, tensors and JSON values.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _split(name, tree, tensors)


def join(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that `split` took apart."""
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
