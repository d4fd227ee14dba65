import json

import numpy as np
import pytest

from nestrec.balance.cost import TOKENS, CostModel, fit_cost, hstu_cost
from nestrec.base.config import dumps
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError


def measured_lengths(num: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 2048, rng.integers(1, 20)) for _ in range(num)]


def test_cost_of_tokens_equals_length() -> None:
    assert TOKENS.sample_costs(np.array([0, 1, 7, 2048])).tolist() == [0.0, 1.0, 7.0, 2048.0]


def test_cost_is_sum_of_three_terms() -> None:
    model = CostModel(token=2.0, token_squared=0.5, candidate=10.0)
    assert model.sample_costs(np.array([4, 0]), np.array([1, 3])).tolist() == [8.0 + 8.0 + 10.0, 30.0]


def test_hstu_cost_matches_published_flops() -> None:
    model = hstu_cost(dim=1024, num_heads=8, head_dim=128, num_layers=16)
    assert model.token_squared / model.token == pytest.approx(1 / 5120)
    # The published dense backbone has 83.97M weights: 6 FLOPs per weight and token.
    assert model.token == pytest.approx(6 * 83.97e6, rel=2e-3)


def test_cost_fit_recovers_true_coefficients() -> None:
    truth = CostModel(token=3e-6, token_squared=2e-9, candidate=5e-5, step=0.01)
    lengths = measured_lengths(60)
    candidates = [np.random.default_rng(i).integers(1, 100, part.size) for i, part in enumerate(lengths)]
    pairs = zip(lengths, candidates, strict=True)
    times = [truth.step + truth.sample_costs(part, counts).sum() for part, counts in pairs]
    fitted = fit_cost(times, lengths, candidates)
    for name in ("token", "token_squared", "candidate", "step"):
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=1e-6)


def test_cost_fit_with_noise_predicts_within_noise() -> None:
    truth = CostModel(token=3e-6, token_squared=2e-9, step=0.01)
    lengths = measured_lengths(400)
    noise = np.random.default_rng(1).normal(1.0, 0.05, len(lengths))
    fitted = fit_cost(
        [(truth.step + truth.sample_costs(part).sum()) * n for part, n in zip(lengths, noise, strict=True)], lengths
    )
    sample = np.array([2048])
    assert fitted.sample_costs(sample)[0] == pytest.approx(truth.sample_costs(sample)[0], rel=0.05)


def test_cost_fit_coefficients_are_nonnegative() -> None:
    lengths = measured_lengths(50)
    sublinear = [np.sqrt(part.sum()) for part in lengths]
    fitted = fit_cost(sublinear, lengths)
    assert min(fitted.token, fitted.token_squared, fitted.step) >= 0
    assert fitted.token_squared == 0


def test_cost_fit_rejects_times_independent_of_length() -> None:
    lengths = [np.full(count, 10) for count in (1, 2, 3, 4)]
    with pytest.raises(UserError, match="do not increase"):
        fit_cost([4.0, 3.0, 2.0, 1.0], lengths)


def test_cost_model_json_round_trip_is_bitwise() -> None:
    model = CostModel(token=1 / 3, token_squared=1e-17 / 7, candidate=0.1, step=2.0**-40)
    assert from_plain(CostModel, json.loads(dumps(model))) == model


@pytest.mark.parametrize("wrong", [{"token": -1.0}, {"token_squared": float("nan")}, {"token": 0.0}])
def test_cost_model_rejects_invalid_coefficients(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        CostModel(**wrong)
