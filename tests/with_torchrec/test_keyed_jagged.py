"""Conversion between `Jagged` features and the `KeyedJaggedTensor` of TorchRec."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nestrec.jagged import Jagged, from_keyed_jagged, offsets_of, to_keyed_jagged


@st.composite
def features(draw):
    num_rows = draw(st.integers(1, 6))
    features_by_name = {}
    for name in draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True)):
        lengths = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=num_rows, max_size=num_rows)))
        features_by_name[name] = Jagged(torch.arange(int(lengths.sum())) + 100 * ord(name), offsets_of(lengths))
    return features_by_name


@given(features())
def test_keyed_jagged_round_trip_preserves_features(given_features):
    converted = from_keyed_jagged(to_keyed_jagged(given_features))
    assert list(converted) == list(given_features)
    for name, jagged in given_features.items():
        assert torch.equal(converted[name].values, jagged.values)
        assert torch.equal(converted[name].offsets, jagged.offsets)
        assert converted[name].offsets.dtype == torch.int64


@given(features())
def test_keyed_jagged_has_same_rows_in_torchrec(given_features):
    keyed = to_keyed_jagged(given_features)
    for name, jagged in given_features.items():
        rows = keyed[name].to_dense()
        assert all(torch.equal(a, b) for a, b in zip(rows, jagged.rows(), strict=True))


def test_keyed_jagged_int32_lengths_and_weights_are_read():
    from torchrec import KeyedJaggedTensor

    lengths = torch.tensor([2, 0, 1, 1, 1, 0], dtype=torch.int32)
    keyed = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.arange(5), lengths, weights=torch.ones(5))
    converted = from_keyed_jagged(keyed)
    assert [row.tolist() for row in converted["a"].rows()] == [[0, 1], [], [2]]
    assert [row.tolist() for row in converted["b"].rows()] == [[3], [4], []]
