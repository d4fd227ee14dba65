import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.tasks.metrics import (
    ConfidenceInterval,
    ExposureCounts,
    auc,
    binary_metrics,
    bootstrap,
    bootstrap_auc,
    exposure_metrics,
    log_loss,
    normalized_entropy,
    ranking_metrics,
    user_aucs,
    user_ndcgs,
    weighted_bootstrap,
    window_metrics,
)

scored = st.lists(st.tuples(st.integers(0, 1), st.integers(-3, 3), st.integers(0, 3)), min_size=1, max_size=30)


def test_ranking_metrics_equal_values_by_hand() -> None:
    """The targets are ranked first, third, eleventh, and not at all."""
    metrics = ranking_metrics(np.array([1, 3, 11, 0]), (1, 3, 20))
    assert metrics["hr@1"].tolist() == [1, 0, 0, 0]
    assert metrics["hr@3"].tolist() == [1, 1, 0, 0]
    assert metrics["ndcg@3"] == pytest.approx([1, 0.5, 0, 0])
    assert metrics["ndcg@20"] == pytest.approx([1, 0.5, 1 / np.log2(12), 0])
    assert metrics["mrr@3"] == pytest.approx([1, 1 / 3, 0, 0])
    assert metrics["mrr@20"] == pytest.approx([1, 1 / 3, 1 / 11, 0])
    assert list(metrics) == [f"{name}@{k}" for k in (1, 3, 20) for name in ("hr", "ndcg", "mrr")]


@given(scored)
def test_auc_is_the_fraction_of_ordered_pairs(events: list[tuple[int, int, int]]) -> None:
    """Compares with a quadratic reference implementation, with ties and with weights, including zero."""
    label, score, weight = (np.array(column) for column in zip(*events, strict=True))
    pairs = right = 0.0
    for i in np.flatnonzero(label == 1):
        for j in np.flatnonzero(label == 0):
            pairs += weight[i] * weight[j]
            right += weight[i] * weight[j] * ((score[i] > score[j]) + (score[i] == score[j]) / 2)
    result = auc(label, score.astype(float), weight.astype(float))
    assert result == pytest.approx(right / pairs if pairs else float("nan"), nan_ok=True)
    repeated = np.repeat(np.arange(len(label)), weight)
    assert auc(label[repeated], score[repeated].astype(float)) == pytest.approx(result, nan_ok=True)


def test_bootstrap_keeps_means_and_shares_draws_between_metrics() -> None:
    values = np.random.default_rng(0).random(50)
    result = bootstrap({"a": values, "b": 2 * values + 1}, num_draws=200)
    assert result["a"].mean == pytest.approx(values.mean())
    assert result["b"].low == pytest.approx(2 * result["a"].low + 1)
    assert result["b"].high == pytest.approx(2 * result["a"].high + 1)
    assert result["a"].low < result["a"].mean < result["a"].high
    assert bootstrap({"a": values, "b": 2 * values + 1}, num_draws=200) == result


def test_bootstrap_intervals_have_nominal_coverage() -> None:
    draw = np.random.default_rng(1)
    samples = [draw.random(60) < 0.3 for _ in range(200)]
    hits = 0
    for i, sample in enumerate(samples):
        interval = bootstrap({"x": sample.astype(float)}, num_draws=200, seed=i)["x"]
        hits += interval.low <= 0.3 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_bootstrap_auc_resamples_users_not_events() -> None:
    """Copies of a user's events do not narrow the interval, unlike an interval that resamples events."""
    draw = np.random.default_rng(2)
    label = draw.integers(0, 2, 60)
    users = np.arange(60)
    score = label + draw.normal(size=60)
    once = bootstrap_auc(label, score, users)
    copies = np.tile(np.arange(60), 9)
    often = bootstrap_auc(label[copies], score[copies], users[copies])
    by_event = bootstrap_auc(label[copies], score[copies], np.arange(540))
    assert often.mean == pytest.approx(once.mean)
    assert (often.low, often.high) == pytest.approx((once.low, once.high))
    assert by_event.high - by_event.low < 0.6 * (once.high - once.low)


def test_log_loss_and_normalized_entropy_equal_values_by_hand() -> None:
    label, logit = np.array([1, 0, 0, 0]), np.array([0.0, 0.0, 2.0, -800.0])
    expected = [np.log(2), np.log(2), np.log1p(np.exp(2.0)), 0.0]
    assert log_loss(label, logit) == pytest.approx(expected)
    base = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    assert normalized_entropy(label, logit) == pytest.approx(np.mean(expected) / base)
    assert normalized_entropy(label, np.full(4, np.log(1 / 3))) == pytest.approx(1.0)


def test_metrics_of_empty_data_are_nan_without_warning() -> None:
    nothing, none = np.zeros(0, np.int64), np.zeros(0)
    assert np.isnan(bootstrap({"a": none})["a"].mean)
    assert np.isnan(auc(nothing, none))
    assert np.isnan(normalized_entropy(nothing, none))
    assert np.isnan(bootstrap_auc(nothing, none, nothing).low)
    only_positive = bootstrap_auc(np.ones(3, np.int64), np.arange(3.0), np.arange(3))
    assert np.isnan([only_positive.mean, only_positive.low, only_positive.high]).all()
    assert np.isnan(normalized_entropy(np.ones(3, np.int64), np.arange(3.0)))
    one_label_a_draw = bootstrap_auc(np.array([0, 0, 1]), np.zeros(3), np.array([1, 2, 0]), num_draws=2)
    assert one_label_a_draw.mean == 0.5
    assert np.isnan([one_label_a_draw.low, one_label_a_draw.high]).all(), "no draw has users of both labels"


def test_confidence_interval_prints_mean_and_bounds() -> None:
    assert str(ConfidenceInterval(0.12345, 0.1, 0.2)) == "0.1235 [0.1000, 0.2000]"


exposures = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12)


@given(exposures)
def test_exposure_metrics_equal_reference_implementation(pairs: list[tuple[int, int]]) -> None:
    """Reference implementation: Gini is the mean difference of all pairs of items over twice the mean."""
    shown, trained = (np.array([0, *column]) for column in zip(*pairs, strict=True))
    result = {name: value.mean for name, value in exposure_metrics(ExposureCounts(shown, 5), trained).items()}
    if not shown.sum():
        assert all(np.isnan(value) for value in result.values())
        return
    counts = shown[1:].tolist()
    events = trained[1:].tolist()
    size = len(counts)
    total = sum(counts)
    assert result["coverage@5"] == pytest.approx(sum(c > 0 for c in counts) / size)
    differences = sum(abs(a - b) for a in counts for b in counts)
    assert result["gini@5"] == pytest.approx(differences / (2 * size * total), abs=1e-12)
    shares = [(e + 1) / (sum(events) + size) for e in events]
    assert result["novelty@5"] == pytest.approx(
        -sum(c * np.log2(s) for c, s in zip(counts, shares, strict=True)) / total
    )


@given(scored)
def test_gauc_and_calibration_equal_reference_implementation(events: list[tuple[int, int, int]]) -> None:
    label, logit, user = (np.array(column) for column in zip(*events, strict=True))
    result = binary_metrics(label, logit.astype(np.float64), user, num_draws=2)
    aucs = []
    for u in sorted(set(user.tolist())):
        own_events = [(y, s) for y, s, v in events if v == u]
        pairs = [(a, b) for ya, a in own_events for yb, b in own_events if ya and not yb]
        if pairs:
            aucs.append((sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs), len(own_events)))
    if aucs:
        assert result["gauc"].mean == pytest.approx(sum(a * n for a, n in aucs) / sum(n for _, n in aucs))
    else:
        assert np.isnan(result["gauc"].mean)
    if label.any():
        mean = sum(1 / (1 + np.exp(-s)) for _, s, _ in events) / len(events)
        assert result["calibration"].mean == pytest.approx(mean / (label.sum() / len(label)))


def test_bootstrap_of_one_user_has_no_interval() -> None:
    label = np.array([0, 1, 1])
    user = np.full(3, 7)
    result = [
        bootstrap({"hit": np.array([0.0, 1.0, 1.0])}, groups=user)["hit"],
        bootstrap_auc(label, np.array([0.0, 1.0, 2.0]), user),
        weighted_bootstrap(np.array([0.7]), np.array([3.0])),
    ]
    assert [interval.mean for interval in result] == [pytest.approx(2 / 3), 1.0, 0.7]
    assert np.isnan([[interval.low, interval.high] for interval in result]).all()


def test_bootstrap_draws_values_of_a_user_together() -> None:
    """One user is always right, one always wrong: with many values each, the interval still spans 0 to 1."""
    values = {"hit": np.repeat([1.0, 0.0], 500)}
    users = np.repeat([3, 9], 500)
    assert bootstrap(values, groups=users)["hit"] == ConfidenceInterval(0.5, 0.0, 1.0)
    assert bootstrap(values)["hit"].low > 0.4


def test_bootstrap_intervals_span_95_percent_of_draws() -> None:
    """Means of many users are nearly normal: 1.96 standard errors to each side (a 90% interval would have 1.64)."""
    draw = np.random.default_rng(3)
    values = draw.normal(size=400)
    users = np.arange(400)
    standard_error = values.std() / np.sqrt(400)
    label = draw.integers(0, 2, 400)
    score = label + draw.normal(size=400)
    resampled = [auc(label[chosen], score[chosen]) for chosen in draw.integers(0, 400, (2000, 400))]
    result = {
        bootstrap({"x": values}, num_draws=4000)["x"]: standard_error,
        weighted_bootstrap(values, np.ones(400), num_draws=4000): standard_error,
        bootstrap_auc(label, score, users, num_draws=2000): float(np.std(resampled)),
    }
    for interval, error in result.items():
        assert (interval.high - interval.low) / (2 * error) == pytest.approx(1.96, abs=0.15)
        assert interval.high - interval.mean == pytest.approx(interval.mean - interval.low, rel=0.15)


def test_weighted_bootstrap_equals_repeated_values() -> None:
    draw = np.random.default_rng(4)
    values = draw.random(30)
    weights = draw.integers(1, 9, 30)
    users = np.repeat(np.arange(30), weights)
    expected = bootstrap({"x": np.repeat(values, weights)}, groups=users, num_draws=100)["x"]
    result = weighted_bootstrap(values, weights.astype(np.float64), num_draws=100)
    assert (result.mean, result.low, result.high) == pytest.approx((expected.mean, expected.low, expected.high))


@given(scored, st.integers(1, 5))
def test_user_ndcg_equals_reference_implementation(events: list[tuple[int, int, int]], k: int) -> None:
    """Reference implementation: discounted gain of each user's top k events over that of the ideal order."""
    label, _, user = (np.array(column) for column in zip(*events, strict=True))
    score = np.random.default_rng(0).permutation(len(events)).astype(np.float64)
    expected = []
    for one in sorted(set(user.tolist())):
        own_events = sorted(
            ((s, y) for s, y, u in zip(score, label.tolist(), user, strict=True) if u == one), reverse=True
        )
        gain, best = (
            sum(y / np.log2(i + 2) for i, y in enumerate(labels[:k]))
            for labels in ([y for _, y in own_events], sorted((y for _, y in own_events), reverse=True))
        )
        expected += [gain / best] if best else []
    assert user_ndcgs(label, score, user, k) == pytest.approx(expected)


def test_metrics_of_single_values_have_no_interval() -> None:
    result = exposure_metrics(ExposureCounts(np.array([0, 3, 1, 0]), 2), np.array([0, 5, 1, 1]))
    label = np.array([0, 1, 1, 0])
    result |= binary_metrics(label, np.arange(4.0), np.arange(4), num_draws=5)
    result |= window_metrics(label, np.arange(4.0), np.arange(4))
    alone = [result[name] for name in ("coverage@2", "gini@2", "novelty@2", "ne", "calibration")]
    assert np.isnan([[interval.low, interval.high] for interval in alone]).all()
    assert np.isfinite([interval.mean for interval in alone]).all()
    assert set(window_metrics(label, np.arange(4.0), np.arange(4))) == {"auc", "gauc", "ndcg@10", "ne"}
    assert set(binary_metrics(label, np.arange(4.0), np.arange(4))) == {"auc", "gauc", "ne", "calibration"}
    nothing = weighted_bootstrap(np.zeros(0), np.zeros(0))
    assert np.isnan([nothing.mean, nothing.low, nothing.high]).all()


def test_metrics_of_no_events_are_nan_under_their_names() -> None:
    none = np.zeros(0, np.int64)
    for result, names in (
        (binary_metrics(none, np.zeros(0), none), {"auc", "gauc", "ne", "calibration"}),
        (window_metrics(none, np.zeros(0), none), {"auc", "gauc", "ndcg@10", "ne"}),
        (
            exposure_metrics(ExposureCounts(np.zeros(4, np.int64), 3), np.arange(4)),
            {"coverage@3", "gini@3", "novelty@3"},
        ),
        (bootstrap({"a": np.zeros(0), "b": np.zeros(0)}), {"a", "b"}),
    ):
        assert set(result) == names
        assert np.isnan([[interval.mean, interval.low, interval.high] for interval in result.values()]).all()


def test_window_metrics_resample_users() -> None:
    draw = np.random.default_rng(6)
    label = draw.integers(0, 2, 80)
    logit = label + draw.normal(size=80)
    user = np.repeat(np.arange(20), 4)
    result = window_metrics(label, logit, user)
    assert result["auc"] == bootstrap_auc(label, logit, user, num_draws=100)
    assert result["gauc"] == weighted_bootstrap(*user_aucs(label, logit, user))
    ndcg = user_ndcgs(label, logit, user, 10)
    assert result["ndcg@10"] == weighted_bootstrap(ndcg, np.ones(len(ndcg)))
    result = binary_metrics(label, logit, user, num_draws=30)
    assert result["auc"] == bootstrap_auc(label, logit, user, num_draws=30)
    assert result["gauc"] == weighted_bootstrap(*user_aucs(label, logit, user), num_draws=30)
    assert binary_metrics(label, logit, user)["auc"] == bootstrap_auc(label, logit, user, num_draws=200)
