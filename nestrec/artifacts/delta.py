"""What has changed between two descriptions of a model, so that a version need not repeat a whole catalogue.

JSON: of objects the members that differ, of lists that have grown what came to their ends, else the new value.
Tensors: the rows that differ, and those that are new.
"""

from collections.abc import Mapping
from typing import Any

import torch

_SAME, _MEMBERS, _MORE, _VALUE = "same", "members", "more", "value"
IDS, VALUES = "ids", "values"


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
