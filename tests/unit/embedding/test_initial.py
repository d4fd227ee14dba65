import numpy as np
import pytest
import torch

from nestrec.base.random import fold
from nestrec.embedding import InitConfig, TableConfig
from nestrec.embedding.initial import initial_vectors, initial_vectors_torch, multiplier_of

KEYS = np.array([0, 1, -1, 2**63 - 1, -(2**63), 123_456_789_012])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["normal", "uniform", "zeros"])
def test_initial_rows_of_host_loops_equal_torch_bitwise(dtype, kind):
    table = TableConfig(name="t", dim=33, dtype=dtype, seed=7, init=InitConfig(kind=kind, scale=0.3))
    assert torch.equal(initial_vectors(KEYS, table), initial_vectors_torch(torch.from_numpy(KEYS), table))


def test_initial_rows_depend_on_seed_key_and_column():
    table = TableConfig(name="t", dim=5, seed=11)
    hashed = fold(11, -1, 3)
    lanes = sum((hashed >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 131070
    expected = np.float32(lanes) * np.float32(multiplier_of(table.init))
    assert initial_vectors(KEYS, table)[2, 3].item() == expected
    assert torch.equal(initial_vectors(KEYS[::-1].copy(), table), initial_vectors(KEYS, table).flip(0))


@pytest.mark.parametrize(("kind", "std"), [("normal", 0.02), ("uniform", 0.02 / 3**0.5)])
def test_initial_rows_have_configured_moments(kind, std):
    vectors = initial_vectors(np.arange(20_000), TableConfig(name="t", dim=64, init=InitConfig(kind=kind, scale=0.02)))
    assert abs(float(vectors.mean())) < 1e-4
    assert float(vectors.std()) == pytest.approx(std, rel=0.01)
    between_rows, between_elements = (
        np.corrcoef(vectors[:-1, 0], vectors[1:, 0]),
        np.corrcoef(vectors[:, 0], vectors[:, 1]),
    )
    assert max(abs(between_rows[0, 1]), abs(between_elements[0, 1])) < 0.03
