import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nestrec.balance import EQUAL_COUNTS, POLICIES, TOKENS, BalanceConfig, CostModel, balance, hstu_cost, partition
from nestrec.balance.balance_metrics import imbalance
from nestrec.balance.partition_tools import loads_of
from nestrec.base.config import dumps
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.data.synthetic.synthetic_logs import lengths as draw_lengths

HSTU = hstu_cost(dim=1024, num_heads=8, head_dim=128, num_layers=16)
every_policy = pytest.mark.parametrize("policy", POLICIES)


@st.composite
def batches(draw: Callable[..., int]) -> NDArray[np.int64]:
    """Draw 0 to 200 lengths: heavy-tailed, with many ties, with one outlier, equal, or all zero."""
    size, seed = draw(st.integers(0, 200)), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["lognormal", "ties", "one outlier", "equal", "zeros"]))
    if kind == "lognormal":
        return np.rint(rng.lognormal(6.0, 1.5, size)).astype(np.int64)
    if kind == "ties":
        return rng.integers(1, 4, size)
    lengths = np.full(size, 0 if kind == "zeros" else 10, dtype=np.int64)
    if kind == "one outlier" and size:
        lengths[rng.integers(size)] = 100_000
    return lengths


costs = st.sampled_from([TOKENS, HSTU, CostModel(token=0.1, token_squared=1e-4)])
rank_counts = st.integers(1, 40)


@every_policy
@settings(deadline=None, max_examples=150)
@given(lengths=batches(), num_ranks=rank_counts, model=costs, with_lengths=st.booleans())
def test_balance_policy_assigns_every_sample_once(
    policy: str, lengths: NDArray[np.int64], num_ranks: int, model: CostModel, with_lengths: bool
) -> None:
    groups = partition(policy, model.sample_costs(lengths), num_ranks, lengths=lengths if with_lengths else None)
    assert len(groups) == num_ranks
    assert all((np.diff(group) > 0).all() for group in groups)
    assert np.sort(np.concatenate(groups)).tolist() == list(range(lengths.size))


@every_policy
@settings(deadline=None, max_examples=150)
@given(lengths=batches(), num_ranks=rank_counts, model=costs, with_lengths=st.booleans())
def test_balance_policies_are_not_worse_than_fixed(
    policy: str, lengths: NDArray[np.int64], num_ranks: int, model: CostModel, with_lengths: bool
) -> None:
    cost = model.sample_costs(lengths)
    groups = partition(policy, cost, num_ranks, lengths=lengths if with_lengths else None)
    assert loads_of(cost, groups).max() <= loads_of(cost, partition("fixed", cost, num_ranks)).max()


@pytest.mark.parametrize("policy", sorted(EQUAL_COUNTS))
@settings(deadline=None, max_examples=150)
@given(lengths=batches(), num_ranks=rank_counts, model=costs)
def test_equal_count_policies_assign_equal_counts(
    policy: str, lengths: NDArray[np.int64], num_ranks: int, model: CostModel
) -> None:
    cost = model.sample_costs(lengths)
    for groups in (partition(policy, cost, num_ranks), POLICIES[policy](cost, num_ranks, lengths=lengths)):
        counts = [group.size for group in groups]
        assert max(counts) - min(counts) <= 1


@every_policy
@settings(deadline=None, max_examples=50)
@given(lengths=batches(), num_ranks=rank_counts, model=costs)
def test_balance_partition_is_deterministic(
    policy: str, lengths: NDArray[np.int64], num_ranks: int, model: CostModel
) -> None:
    """The partition does not depend on the memory layout or the byte alignment of the costs."""
    cost = model.sample_costs(lengths)
    strided = np.empty((cost.size, 3))
    strided[:, 1] = cost
    first, second = partition(policy, cost, num_ranks), partition(policy, strided[:, 1], num_ranks)
    assert [group.tolist() for group in first] == [group.tolist() for group in second]


@settings(deadline=None, max_examples=150)
@given(lengths=batches(), num_ranks=rank_counts, model=costs)
def test_refined_is_not_worse_than_greedy_or_differencing(
    lengths: NDArray[np.int64], num_ranks: int, model: CostModel
) -> None:
    cost = model.sample_costs(lengths)
    top = {p: loads_of(cost, partition(p, cost, num_ranks)).max() for p in ("refined", "greedy", "karmarkar_karp")}
    bound = max(cost.sum() / num_ranks, cost.max(initial=0.0))
    assert top["refined"] <= max(min(top["greedy"], top["karmarkar_karp"]), bound * 1.001) * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), num_ranks=st.integers(2, 4))
def test_refined_is_close_to_the_optimum_of_small_batches(seed: int, num_ranks: int) -> None:
    cost = np.random.default_rng(seed).integers(1, 100, 8).astype(np.float64)
    choices = np.indices((num_ranks,) * 8).reshape(8, -1)
    best = np.max([(cost[:, None] * (choices == rank)).sum(axis=0) for rank in range(num_ranks)], axis=0).min()
    # Graham's bound for longest-first is guaranteed; with swaps, the result is nearly always optimal.
    assert loads_of(cost, partition("refined", cost, num_ranks)).max() <= best * (4 / 3 - 1 / (3 * num_ranks))


def test_zigzag_matches_published_assignment() -> None:
    lengths = np.array([90, 80, 70, 60, 50, 40, 30, 20, 10])
    groups = POLICIES["zigzag"](TOKENS.sample_costs(lengths), 3, lengths=lengths)
    assert [group.tolist() for group in groups] == [[0, 5, 6], [1, 4, 7], [2, 3, 8]]


def test_token_threshold_keeps_order_and_minimizes_maximum() -> None:
    lengths = np.array([5, 5, 5, 5, 20, 1, 1, 18])
    groups = POLICIES["token_threshold"](TOKENS.sample_costs(lengths), 3, lengths=lengths)
    assert [group.tolist() for group in groups] == [[0, 1, 2, 3], [4], [5, 6, 7]]


def test_greedy_assigns_longest_to_least_loaded() -> None:
    groups = POLICIES["greedy"](np.array([7.0, 6.0, 5.0, 4.0, 3.0]), 2)
    assert [group.tolist() for group in groups] == [[0, 3, 4], [1, 2]]


def test_differencing_beats_greedy_on_the_textbook_case() -> None:
    cost = np.array([8.0, 7.0, 6.0, 5.0, 4.0, 0.0])
    assert loads_of(cost, POLICIES["karmarkar_karp"](cost, 2)).max() == 16.0
    assert loads_of(cost, POLICIES["greedy"](cost, 2)).max() == 17.0


def test_balance_falls_back_to_fixed() -> None:
    cost, lengths = np.array([4.0, 0.0, 0.0, 4.0]), np.array([9, 5, 4, 1])
    assert loads_of(cost, POLICIES["zigzag"](cost, 2, lengths=lengths)).tolist() == [8.0, 0.0]
    assert [group.tolist() for group in partition("zigzag", cost, 2, lengths=lengths)] == [[0, 1], [2, 3]]


@every_policy
def test_balance_fewer_samples_than_ranks_leaves_ranks_empty(policy: str) -> None:
    groups = partition(policy, np.array([5.0, 1.0]), 5, lengths=np.array([5, 1]))
    assert sorted(group.size for group in groups) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("model", [TOKENS, HSTU])
@pytest.mark.parametrize(("preset", "num_ranks", "batch"), [("turbogr-kuai", 16, 8), ("freescale", 64, 128)])
def test_refined_policy_evens_skewed_batches(preset: str, num_ranks: int, batch: int, model: CostModel) -> None:
    found: dict[str, list[float]] = {"fixed": [], "refined": []}
    for seed in range(10):
        cost = model.sample_costs(draw_lengths(preset, num_ranks * batch, seed))
        for policy, values in found.items():
            values.append(imbalance(loads_of(cost, partition(policy, cost, num_ranks))))
    assert np.mean(found["refined"]) <= 0.005
    assert np.mean(found["fixed"]) >= 0.20


def test_partitioner_returns_samples_of_its_rank() -> None:
    lengths = draw_lengths("turbogr-kuai", 128, 3)
    cfg = BalanceConfig(policy="refined", cost=HSTU)
    parts = balance(cfg, lengths, 16)
    assert np.sort(np.concatenate(parts)).tolist() == list(range(128))
    assert imbalance(loads_of(HSTU.sample_costs(lengths), parts)) < 0.01


def test_balance_cost_includes_candidates() -> None:
    lengths, candidates = np.array([10, 10, 10, 10]), np.array([100, 1, 1, 100])
    cfg = BalanceConfig(policy="refined", cost=CostModel(candidate=1.0))
    parts = balance(cfg, lengths, 2, candidates=candidates)
    assert sorted(int(candidates[part].sum()) for part in parts) == [101, 101]


def test_balance_policy_typo_gets_suggestion() -> None:
    with pytest.raises(UserError, match="Did you mean 'greedy'"):
        BalanceConfig(policy="gredy")


def test_balance_config_json_round_trip() -> None:
    cfg = BalanceConfig(policy="refined", cost=HSTU)
    assert from_plain(BalanceConfig, json.loads(dumps(cfg))) == cfg
