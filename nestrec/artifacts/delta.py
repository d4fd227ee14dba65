"""Artifacts that build on earlier ones: their chains, what may be deleted, the newest rows, and differences.

A checkpoint or a published version is full, or completes an earlier one, its base. Differences keep a delta small. Of
JSON objects they hold the members that differ, of lists that have grown what came to their ends, else the new value; of
tensors the rows that differ, and those that are new.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import CorruptFileError

T = TypeVar("T")
K = TypeVar("K", str, int)
Keys = NDArray[np.int64]
Rows = Mapping[str, torch.Tensor]
"""Rows of a table: `keys` (n,) int64, and any other columns of n rows each."""
_SAME, _MEMBERS, _MORE, _VALUE = "same", "members", "more", "value"
IDS, VALUES = "ids", "values"
_NO_KEYS: Keys = np.empty(0, dtype=np.int64)


def chain_of(newest: T, base_of: Callable[[T], T | None]) -> Iterator[T]:
    """Yield an artifact and those that it builds on, newest first, down to one that `base_of` returns None for."""
    artifact: T | None = newest
    while artifact is not None:
        yield artifact
        artifact = base_of(artifact)


def to_delete(present: Iterable[K], kept: Iterable[K], base_of: Callable[[K], K | None]) -> list[K]:
    """Return the artifacts that are not in `kept` and that no artifact of `kept` builds on.

    Args:
        present: Names or numbers of all artifacts; of two, the earlier one is less.
        kept: Those that stay in any case.
        base_of: What one of them builds on, or None. If it raises `CorruptFileError`, all that are earlier stay,
            because the artifact may build on any of them.
    """
    present, needed = list(present), set[K]()
    for newest in kept:
        last = newest
        try:
            for last in chain_of(newest, base_of):
                if last in needed:
                    break
                needed.add(last)
        except CorruptFileError:
            needed.update(earlier for earlier in present if earlier < last)
    return [each for each in present if each not in needed]


def newest_rows(
    layers: Sequence[tuple[Iterable[Rows], Iterable[Rows]]],
    *,
    superseded: Keys = _NO_KEYS,
    owned: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Iterator[Rows]:
    """Yield the rows of a table, each key once with its newest values.

    Args:
        layers: The rows and the removed keys of each artifact of a chain, newest first. An artifact may write a key
            that it has removed.
        superseded: Sorted keys to leave out.
        owned: Of (n,) keys, which to yield, (n,) bool; None: all.
    """
    for depth, (rows, removed) in enumerate(layers):
        is_last = depth == len(layers) - 1  # its keys, which may be all keys of a table, supersede nothing
        newer = [superseded]
        for chunk in rows:
            if not is_last:
                newer.append(chunk["keys"].numpy())
            yield from _wanted(chunk, superseded, owned)
        if not is_last:
            newer += [chunk["keys"].numpy() for chunk in removed]
            superseded = np.unique(np.concatenate(newer))


def _wanted(chunk: Rows, superseded: Keys, owned: Callable[[torch.Tensor], torch.Tensor] | None) -> Iterator[Rows]:
    keys = chunk["keys"]
    mask = torch.from_numpy(~_contains(superseded, keys.numpy()))
    if owned is not None:
        mask &= owned(keys)
    if bool(mask.all()):
        if len(keys):
            yield chunk
    elif bool(mask.any()):
        yield {name: column[mask] for name, column in chunk.items()}


def _contains(sorted_keys: Keys, keys: Keys) -> NDArray[np.bool_]:
    if not len(sorted_keys):
        return np.zeros(len(keys), dtype=np.bool_)
    index = np.searchsorted(sorted_keys, keys).clip(max=len(sorted_keys) - 1)
    found: NDArray[np.bool_] = sorted_keys[index] == keys
    return found


def json_difference(old: Any, new: Any) -> dict[str, Any]:
    """What makes `new` out of `old`."""
    if old == new:
        return {_SAME: True}
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return {_MEMBERS: {name: json_difference(old[name], new[name]) for name in new if old[name] != new[name]}}
    if isinstance(old, list) and isinstance(new, list):
        if len(new) > len(old) and new[: len(old)] == old:
            return {_MORE: new[len(old) :]}
        if len(new) == len(old) and all(isinstance(value, dict) for value in (*old, *new)):
            changed = {str(i): json_difference(old[i], new[i]) for i in range(len(new)) if old[i] != new[i]}
            return {_MEMBERS: changed}
    return {_VALUE: new}


def json_changed(old: Any, difference: Mapping[str, Any]) -> Any:
    """The inverse: what `json_difference` was given as `new`. `old` is left as it is."""
    ((kind, content),) = difference.items()
    match kind:
        case "same":
            return old
        case "more":
            return [*old, *content]
        case "members" if isinstance(old, list):
            return [json_changed(value, content[str(i)]) if str(i) in content else value for i, value in enumerate(old)]
        case "members":
            return {name: json_changed(old[name], content[name]) if name in content else old[name] for name in old}
        case "value":
            return content
        case _:
            raise ValueError(f"is no difference: {kind!r}")


def rows_difference(old: torch.Tensor | None, new: torch.Tensor) -> dict[str, torch.Tensor]:
    """Ids and values of the rows of `new` that `old` has otherwise or not at all."""
    if old is None or len(new) < len(old) or old.shape[1:] != new.shape[1:] or old.dtype != new.dtype:
        ids = torch.arange(len(new))
    else:
        differ = (old != new[: len(old)]).reshape(len(old), -1).any(1)
        ids = torch.cat([differ.nonzero()[:, 0], torch.arange(len(old), len(new))])
    return {IDS: ids, VALUES: new[ids]}


def rows_changed(old: torch.Tensor | None, num_rows: int, difference: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The inverse; a new tensor."""
    values = difference[VALUES]
    new = torch.zeros(num_rows, *values.shape[1:], dtype=values.dtype)
    if old is not None and old.shape[1:] == values.shape[1:]:
        kept = min(num_rows, len(old))
        new[:kept] = old[:kept]
    new[difference[IDS]] = values
    return new
