"""Delta chains: the artifacts that may be deleted, and the newest rows of a table."""

import random

import numpy as np
import pytest
import torch

from nestrec.artifacts.delta import chain_of, newest_rows, to_delete
from nestrec.base.errors import CorruptFileError

BASES = {1: None, 2: 1, 3: 2, 4: None, 5: 4, 6: 5}


def test_chain_of_ends_at_a_full_artifact() -> None:
    assert list(chain_of(6, BASES.get)) == [6, 5, 4]


@pytest.mark.parametrize(("keep", "deleted"), [(1, [1, 2, 3]), (3, [1, 2, 3]), (4, []), (6, [])])
def test_to_delete_keeps_bases_of_retained_artifacts(keep: int, deleted: list[int]) -> None:
    assert to_delete(BASES, list(BASES)[-keep:], BASES.get) == deleted


def test_to_delete_keeps_all_before_corrupt_artifact() -> None:
    def base_of(number: int) -> int | None:
        if number == 3:
            raise CorruptFileError("cannot be read", option="manifest", value=number)
        return {5: 3}.get(number)

    assert to_delete(range(1, 6), [5], base_of) == [4]


def rows(keys: list[int], value: float) -> dict[str, torch.Tensor]:
    return {"keys": torch.tensor(keys), "weight": torch.full((len(keys), 2), value)}


@pytest.mark.parametrize("seed", range(5))
def test_newest_rows_equal_dictionary(seed: int) -> None:
    draw = random.Random(seed)
    table = dict[int, float]()
    layers = []
    for step in range(4):
        removed = draw.sample(range(20), 5)
        written = [draw.sample(range(20), 6) for _ in range(2)]
        written[1] = [key for key in written[1] if key not in written[0]]
        for key in removed if step else ():
            table.pop(key, None)
        table |= {key: float(step) for key in [*written[0], *written[1]]}
        removed_keys = [{"keys": torch.tensor(removed)}] if step else []
        layers.append(([rows(keys, step) for keys in written], removed_keys))
    superseded = np.array([1, 3])
    chunks = list(newest_rows(layers[::-1], superseded=superseded, owned=lambda keys: keys % 2 == 1))
    pairs = [(int(k), float(w[0])) for chunk in chunks for k, w in zip(chunk["keys"], chunk["weight"], strict=True)]
    assert len(pairs) == len(dict(pairs))
    assert dict(pairs) == {key: value for key, value in table.items() if key % 2 == 1 and key not in (1, 3)}
