"""Batches from scripts: supported fields, and errors that name the field."""

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.jagged import Jagged
from nestrec.pipeline.script_batches import parse_fields


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([2, 3], "must increase from 0 to the number of values, which is 5"),
        ([0, 2, 3], "must increase from 0 to the number of values, which is 5"),
        ([0, 4, 2, 5], "must increase from 0"),
        ([0.0, 5.0], r"torch.float32 \(2,\)"),
        ([], r"torch.float32 \(0,\)"),
    ],
)
def test_custom_batch_rejects_invalid_jagged_offsets(offsets, message):
    with pytest.raises(UserError, match=rf"=history: .*{message}.*offsets_of\(lengths\)"):
        parse_fields({"history": Jagged(torch.arange(5), torch.tensor(offsets))})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array(["1", "2"]), "tensors do not support the dtype <U1"),
        (np.array([1, 2], object), "do not support the dtype object"),
        (torch.tensor([1, 2]).to_sparse(), "torch.sparse_coo: this layout cannot be split"),
        ([1, 2], r"must contain keys.*class list.*from_rows"),
        (torch.tensor(3), "class Tensor"),
        (Jagged([1], [0, 1]), "values and offsets of a Jagged must be tensors"),
    ],
)
def test_custom_batch_names_field_with_invalid_keys(value, message):
    with pytest.raises(UserError, match=f"field of a batch=items.*{message}"):
        parse_fields({"items": value}, ["items"])


def test_custom_batch_field_names_must_be_strings():
    with pytest.raises(UserError, match="field of a batch=3: field names must be strings"):
        parse_fields({3: torch.ones(2)})


def test_custom_batch_copies_read_only_arrays():
    fixed = np.array([1, 2])
    fixed.setflags(write=False)  # arrays from Arrow and pandas are read-only
    fields = {"fixed": fixed, "backwards": np.array([2, 1])[::-1], "foreign": np.array([1, 2], ">i8")}
    assert {name: field.tolist() for name, field in parse_fields(fields).items()} == {name: [1, 2] for name in fields}


def test_custom_batch_passes_model_inputs_unchanged():
    others = {"names": ["a", "b"], "shift": 0.5, "none": None}
    assert parse_fields({**others, "items": torch.ones(2)}, ["items"]).items() >= others.items()
