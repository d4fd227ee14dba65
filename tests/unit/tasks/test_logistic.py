import numpy as np
import pytest
import torch

from nestrec.tasks.learned_baselines import SMOOTHING, IdRates, LogisticBaseline, fit


def fit_by_lbfgs(features: np.ndarray, label: np.ndarray, ridge: float) -> np.ndarray:
    """Reference implementation: minimizes the same objective with torch's L-BFGS."""
    x, y = torch.from_numpy(features), torch.from_numpy(label).double()
    weight = torch.zeros(features.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight], max_iter=500, tolerance_grad=1e-11, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(x @ weight, y, reduction="sum")
        loss = loss + ridge / 2 * (weight**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach().numpy()


@pytest.mark.parametrize("ridge", [0.1, 1.0])
def test_logistic_newton_fit_equals_lbfgs(ridge: float) -> None:
    draw = np.random.default_rng(0)
    features = np.concatenate([draw.normal(size=(300, 3)), np.eye(4)[draw.integers(0, 4, 300)]], axis=1)
    chance = 1 / (1 + np.exp(-(features @ draw.normal(size=7))))
    label = (draw.random(300) < chance).astype(np.int64)
    np.testing.assert_allclose(fit(features, label, ridge=ridge), fit_by_lbfgs(features, label, ridge), atol=1e-8)


def test_logistic_fit_of_separable_labels_is_finite() -> None:
    features = np.array([[-2.0], [-1.0], [1.0], [2.0]])
    assert np.isfinite(fit(features, np.array([0, 0, 1, 1]))).all()


def test_id_rates_are_smoothed_and_leave_one_out() -> None:
    ids, label = np.array([0, 0, 0, 1]), np.array([1, 1, 0, 0])
    rates = IdRates.of(ids, label, 3)
    assert rates.overall == 0.5
    with_all = (2 + SMOOTHING * 0.5) / (3 + SMOOTHING)
    without_own = (1 + SMOOTHING * 0.5) / (2 + SMOOTHING)
    assert rates.logit(np.array([0])) == pytest.approx(np.log(with_all / (1 - with_all)))
    assert rates.logit(np.array([0]), np.array([1])) == pytest.approx(np.log(without_own / (1 - without_own)))
    assert rates.logit(np.array([2])) == pytest.approx(0.0)


def test_logistic_baseline_learns_items_without_label_leak() -> None:
    draw = np.random.default_rng(1)
    item, user, tab = draw.integers(0, 20, 4000), draw.integers(0, 2000, 4000), draw.integers(0, 3, 4000)
    label = (draw.random(4000) < np.where(item < 10, 0.8, 0.2)).astype(np.int64)
    sizes = {"num_items": 20, "num_users": 2000, "num_categories": 3}
    model = LogisticBaseline(item, user, tab, label, **sizes)
    good, bad = (model.logits(np.full(1, i), np.full(1, 0), np.full(1, 0))[0] for i in (3, 15))
    assert good > 0.5
    assert bad < -0.5
    noise = draw.integers(0, 2, 4000)
    fooled = LogisticBaseline(item, user, tab, noise, **sizes).logits(item, user, tab)
    assert np.abs(fooled).mean() < 0.25


@pytest.mark.parametrize("only", [0, 1])
def test_logistic_baseline_with_one_label_gives_finite_scores(only: int) -> None:
    ids = np.arange(6) % 3
    label = np.full(6, only)
    model = LogisticBaseline(ids, ids, np.zeros(6, np.int64), label, num_items=3, num_users=3, num_categories=1)
    assert np.isfinite(model.logits(ids, ids, np.zeros(6, np.int64))).all()


def test_logistic_baseline_uses_rates_for_large_categories() -> None:
    draw = np.random.default_rng(2)
    count = 4000
    many = 10**6
    zeros = np.zeros(count, np.int64)
    category = draw.integers(0, 20, count) * (many // 20)
    label = (draw.random(count) < np.where(category < many // 2, 0.8, 0.2)).astype(np.int64)
    model = LogisticBaseline(zeros, zeros, category, label, num_items=1, num_users=1, num_categories=many)
    good, bad = (model.logits(zeros[:1], zeros[:1], np.full(1, c))[0] for c in (0, many - many // 20))
    assert good > 0.5
    assert bad < -0.5
