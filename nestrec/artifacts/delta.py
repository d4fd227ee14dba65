"""Incremental artifacts: chains of deltas, retention, the newest rows of a chain, and differences.

A checkpoint or a published version is full, or it is incremental and extends an earlier one, its base. Differences keep
a delta small: of JSON objects they contain the members that differ, of lists that have grown the appended items,
otherwise the new value; of tensors they contain the rows that differ or are new.
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
"""Rows of a table: `keys` (n,) int64, and any other columns with n rows."""
_SAME, _MEMBERS, _MORE, _VALUE = "same", "members", "more", "value"
IDS, VALUES = "ids", "values"
_NO_KEYS: Keys = np.empty(0, dtype=np.int64)


def chain_of(newest: T, base_of: Callable[[T], T | None]) -> Iterator[T]:
    """Yield an artifact and its bases, newest first, until `base_of` returns None."""
    artifact: T | None = newest
    while artifact is not None:
        yield artifact
        artifact = base_of(artifact)


def to_delete(present: Iterable[K], retained: Iterable[K], base_of: Callable[[K], K | None]) -> list[K]:
    """Return the artifacts that are neither retained nor a base of a retained artifact.

    Args:
        present: Names or numbers of all artifacts, ordered by age: an earlier one compares less than a later one.
        retained: Artifacts to retain.
        base_of: Returns the base of an artifact, or None. If it raises `CorruptFileError`, all earlier artifacts are
            retained, because any of them may be the base.
    """
    present, needed = list(present), set[K]()
    for newest in retained:
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
        layers: Rows and removed keys of each artifact of a chain, newest first. An artifact may write a key that it has
            removed.
        superseded: Sorted keys to leave out.
        owned: Function from (n,) keys to an (n,) bool mask of the keys to yield; None yields all.
    """
    for depth, (rows, removed) in enumerate(layers):
        is_last = depth == len(layers) - 1  # the keys of the oldest layer, possibly all of a table, supersede nothing
        newer = [superseded]
        for chunk in rows:
            if not is_last:
                newer.append(chunk["keys"].numpy())
            yield from _select_rows(chunk, superseded, owned)
        if not is_last:
            newer += [chunk["keys"].numpy() for chunk in removed]
            superseded = np.unique(np.concatenate(newer))


def _select_rows(chunk: Rows, superseded: Keys, owned: Callable[[torch.Tensor], torch.Tensor] | None) -> Iterator[Rows]:
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
    is_member: NDArray[np.bool_] = sorted_keys[index] == keys
    return is_member


def json_diff(old: Any, new: Any) -> dict[str, Any]:
    """Return the difference from `old` to `new`; see `apply_json_diff`."""
    if old == new:
        return {_SAME: True}
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return {_MEMBERS: {name: json_diff(old[name], new[name]) for name in new if old[name] != new[name]}}
    if isinstance(old, list) and isinstance(new, list):
        if len(new) > len(old) and new[: len(old)] == old:
            return {_MORE: new[len(old) :]}
        if len(new) == len(old) and all(isinstance(value, dict) for value in (*old, *new)):
            changed = {str(i): json_diff(old[i], new[i]) for i in range(len(new)) if old[i] != new[i]}
            return {_MEMBERS: changed}
    return {_VALUE: new}


def apply_json_diff(old: Any, difference: Mapping[str, Any]) -> Any:
    """Apply a difference of `json_diff` to `old` and return the new value; `old` is not changed."""
    ((kind, content),) = difference.items()
    match kind:
        case "same":
            return old
        case "more":
            return [*old, *content]
        case "members" if isinstance(old, list):
            return [
                apply_json_diff(value, content[str(i)]) if str(i) in content else value for i, value in enumerate(old)
            ]
        case "members":
            return {name: apply_json_diff(old[name], content[name]) if name in content else old[name] for name in old}
        case "value":
            return content
        case _:
            raise ValueError(f"unknown kind of difference: {kind!r}")


def rows_diff(old: torch.Tensor | None, new: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the ids and values of the rows of `new` that differ from `old` or are new."""
    if old is None or len(new) < len(old) or old.shape[1:] != new.shape[1:] or old.dtype != new.dtype:
        ids = torch.arange(len(new))
    else:
        differ = (old != new[: len(old)]).reshape(len(old), -1).any(1)
        ids = torch.cat([differ.nonzero()[:, 0], torch.arange(len(old), len(new))])
    return {IDS: ids, VALUES: new[ids]}


def apply_rows_diff(old: torch.Tensor | None, num_rows: int, difference: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Apply a difference of `rows_diff` to `old` and return a new tensor with `num_rows` rows."""
    values = difference[VALUES]
    new = torch.zeros(num_rows, *values.shape[1:], dtype=values.dtype)
    if old is not None and old.shape[1:] == values.shape[1:]:
        num_common = min(num_rows, len(old))
        new[:num_common] = old[:num_common]
    new[difference[IDS]] = values
    return new
