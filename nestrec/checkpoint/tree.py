"""Nested state dictionaries as tensors by name plus JSON, so that `torch.optim` state needs no pickle.

tensors, skeleton = split("optimizer", optimizer.state_dict())
optimizer.load_state_dict(join(skeleton, tensors))
"""

from collections.abc import Mapping
from typing import Any

import torch


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
