"""Batches of a script's own: what their fields may be, and what is refused by name."""

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.jagged import Jagged
from nestrec.pipeline.script_batches import fields_of


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([2, 3], "do not go from 0 to its 5 values"),
        ([0, 2, 3], "do not go from 0 to its 5 values"),
        ([0, 4, 2, 5], "never falling"),
        ([0.0, 5.0], r"torch.float32 \(2,\)"),
        ([], r"torch.float32 \(0,\)"),
    ],
)
def test_a_jagged_field_whose_offsets_are_none_is_refused_before_it_gives_other_rows(offsets, words):
    with pytest.raises(UserError, match=rf"'history'.*{words}.*\n.*offsets_of\(lengths\)"):
        fields_of({"history": Jagged(torch.arange(5), torch.tensor(offsets))})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array(["1", "2"]), "holds <U1, which no tensor does"),
        (np.array([1, 2], object), "holds object"),
        (torch.tensor([1, 2]).to_sparse(), "torch.sparse_coo': cannot be cut by sample"),
        ([1, 2], r"must hold keys.*holds list.*\n.*from_rows"),
        (torch.tensor(3), "holds Tensor"),
        (Jagged([1], [0, 1]), "no Jagged of tensors"),
    ],
)
def test_a_field_of_keys_that_holds_something_else_is_named(value, words):
    with pytest.raises(UserError, match=f"field of a batch = 'items.*{words}"):
        fields_of({"items": value}, ["items"])


def test_fields_are_named_by_text():
    with pytest.raises(UserError, match="field of a batch=3: is no name"):
        fields_of({3: torch.ones(2)})


def test_arrays_that_torch_cannot_share_are_copied_without_a_warning():
    fixed = np.array([1, 2])
    fixed.setflags(write=False)  # as arrays of Arrow and pandas are
    given = {"fixed": fixed, "backwards": np.array([2, 1])[::-1], "foreign": np.array([1, 2], ">i8")}
    assert {name: field.tolist() for name, field in fields_of(given).items()} == {name: [1, 2] for name in given}


def test_what_is_for_the_model_alone_stays_as_it_is():
    others = {"names": ["a", "b"], "shift": 0.5, "none": None}
    assert fields_of({**others, "items": torch.ones(2)}, ["items"]).items() >= others.items()
