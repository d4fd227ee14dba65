import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestrec.base.errors import UserError
from nestrec.jagged import Jagged, offsets_of

all_lengths = st.lists(st.integers(0, 5), max_size=6)


def make(lengths: list[int], width: int | None = 3) -> Jagged:
    total = sum(lengths)
    shape = (total,) if width is None else (total, width)
    values = torch.arange(1, 1 + total * (width or 1), dtype=torch.float32).reshape(shape)
    return Jagged(values, offsets_of(torch.tensor(lengths, dtype=torch.int64)))


def assert_same(first: Jagged, second: Jagged) -> None:
    assert first.offsets.dtype == second.offsets.dtype == torch.int64
    assert torch.equal(first.offsets, second.offsets)
    assert torch.equal(first.values, second.values)


@given(all_lengths)
def test_jagged_rows_round_trip(lengths: list[int]) -> None:
    jagged = make(lengths)
    assert [len(row) for row in jagged.rows()] == lengths == jagged.lengths().tolist()
    assert (jagged.num_rows, jagged.num_values) == (len(lengths), sum(lengths))
    if lengths:
        assert_same(Jagged.from_rows(jagged.rows()), jagged)


def test_jagged_without_rows() -> None:
    jagged = Jagged.from_rows([])
    assert (jagged.num_rows, jagged.num_values) == (0, 0)
    assert jagged.to_padded(4).shape == (0, 4)


@given(all_lengths, st.sampled_from([None, 1, 3]), st.integers(0, 3))
def test_jagged_padding_round_trips(lengths: list[int], width: int | None, extra: int) -> None:
    jagged = make(lengths, width)
    padded = jagged.to_padded(max(lengths, default=0) + extra, padding=-1.0)
    assert_same(Jagged.from_padded(padded, jagged.lengths()), jagged)
    assert int((padded == -1).sum()) == padded.numel() - jagged.values.numel()


def test_jagged_padding_rejects_rows_that_do_not_fit() -> None:
    with pytest.raises(AssertionError):
        make([3]).to_padded(2)


@settings(deadline=None)  # the first use of torch.nested takes long
@given(all_lengths.filter(len))
def test_jagged_nested_tensor_round_trips(lengths: list[int]) -> None:
    jagged = make(lengths)
    nested = jagged.to_nested()
    assert_same(Jagged.from_nested(nested), jagged)
    assert [len(row) for row in nested.unbind()] == lengths


def test_jagged_rejects_nested_view_with_gaps() -> None:
    padded = torch.arange(6.0).reshape(2, 3)
    view = torch.nested.narrow(padded, 1, torch.tensor([0, 1]), torch.tensor([1, 2]), layout=torch.jagged)
    with pytest.raises(AssertionError, match="gaps between its rows"):
        Jagged.from_nested(view)
    assert [row.tolist() for row in Jagged.from_nested(view.contiguous()).rows()] == [[0.0], [4.0, 5.0]]


@given(all_lengths)
def test_jagged_values_have_row_and_position(lengths: list[int]) -> None:
    jagged = make(lengths)
    pairs = list(zip(jagged.row_of_value().tolist(), jagged.position_of_value().tolist(), strict=True))
    assert pairs == [(row, position) for row, length in enumerate(lengths) for position in range(length)]


def test_jagged_with_values_keeps_the_rows() -> None:
    jagged = make([2, 0, 1])
    other = jagged.with_values(torch.zeros(3))
    assert other.lengths().tolist() == [2, 0, 1]
    with pytest.raises(AssertionError):
        jagged.with_values(torch.zeros(4))


def test_jagged_to_device_moves_values_and_offsets() -> None:
    moved = make([2, 0, 1]).to("meta")
    assert moved.values.device == moved.offsets.device == torch.device("meta")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_jagged_offsets_are_always_int64(dtype: torch.dtype) -> None:
    offsets = offsets_of(torch.tensor([2, 0, 3], dtype=dtype))
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == [0, 2, 2, 5]


def test_jagged_gradients_flow_through_padding() -> None:
    jagged = make([2, 0, 1])
    values = jagged.values.clone().requires_grad_()
    jagged.with_values(values).to_padded(3).square().sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, 2 * jagged.values)


def test_jagged_keyed_jagged_tensor_round_trips() -> None:
    torchrec = pytest.importorskip("torchrec", reason="TorchRec is installed in a separate environment")
    from nestrec.jagged import from_keyed_jagged, to_keyed_jagged

    features = {"items": make([2, 0, 1], None), "users": make([1, 1, 1], None)}
    keyed = to_keyed_jagged(features)
    assert isinstance(keyed, torchrec.KeyedJaggedTensor)
    back = from_keyed_jagged(keyed)
    for name, jagged in features.items():
        assert_same(back[name], jagged)


def test_jagged_from_rows_accepts_lists_arrays_and_empty_rows():
    jagged = Jagged.from_rows(iter([[3, 8], np.array([], np.int64), torch.tensor([]), np.array([5])]))
    assert (jagged.values.tolist(), jagged.offsets.tolist()) == ([3, 8, 5], [0, 2, 2, 2, 3])
    assert jagged.values.dtype == torch.int64
    assert Jagged.from_rows([]).num_rows == 0
    with pytest.raises(UserError, match=r"rows\[1\]=7: must be a row, not a value"):
        Jagged.from_rows([[1], 7])
