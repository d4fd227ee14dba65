"""Compare all balance policies on the same global batches, with the published figures of the papers.

Predicted figures are means of (max - mean) / max over the costs of the ranks. The cost of a sample comes from the cost
model, optionally multiplied by noise that the policy cannot foresee. There are two cost models: `tokens` counts tokens;
with it, the fixed baseline on `freescale` lengths comes closest to FreeScale's own. `hstu-1024` counts the FLOPs of
HSTU with 8 heads of dimension 128 (TurboGR's large model), a * L + b * L^2 with b / a = 1 / 5120.

    nestrec bench balance --lengths turbogr-kuai --ranks 16 --batch 128
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance import POLICIES, TOKENS, CostModel, hstu_cost, micro_partition, partition
from nestrec.balance.balance_metrics import (
    BalanceMetrics,
    compute_balance_metrics,
    noise_floor,
    noise_gaussian,
    noise_uniform,
)
from nestrec.balance.partition_tools import Groups, loads_of
from nestrec.balance.policies import window_imbalance
from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural
from nestrec.base.errors import UserError, did_you_mean, require
from nestrec.base.random import fold
from nestrec.data.batch_order import epoch_order
from nestrec.data.dataset import Dataset
from nestrec.data.synthetic.synthetic_logs import PRESETS, SyntheticConfig
from nestrec.data.synthetic.synthetic_logs import lengths as draw_lengths
from nestrec_bench.balance.balance_job import MeasuredBalanceConfig, measure
from nestrec_bench.balance.unique_keys import unique_key_rows, with_unique_keys
from nestrec_bench.bench import Bench, OutputPart
from nestrec_bench.pages.balance_tables import show_balance

Row = dict[str, Any]

COSTS: dict[str, CostModel] = {
    "tokens": TOKENS,
    "hstu-1024": hstu_cost(dim=1024, num_heads=8, head_dim=128, num_layers=16),
}
NOISE = 0.1
"""Size of the noise: half of the width for uniform noise, the standard deviation for gaussian noise."""
NOISES: dict[str, Callable[[int, float, int], NDArray[np.float64]]] = {
    "none": lambda num_samples, amount, seed: np.ones(num_samples),
    "uniform": noise_uniform,
    "gaussian": noise_gaussian,
}

AMAZON_LIKE = SyntheticConfig(
    name="amazon-like", num_users=22_363, num_items=12_101, ln_mean=2.02, ln_sd=0.49, max_length=204
)
"""Preset with the sequence lengths of Amazon Beauty (5-core)."""

SETTINGS = (("turbogr-kuai", 16, 8), ("amazon-like", 16, 1024), ("freescale", 64, 128), ("freescale", 256, 128))
"""(lengths, ranks, samples per rank). TurboGR does not report the batch size for Amazon; 1024 results in nearly the
same token gap."""

MEASURED_RANKS = (2, 4)
"""Numbers of ranks of the measured settings, as processes on one machine."""

PUBLISHED: tuple[Row, ...] = (
    {"system": "TurboGR Table 3", "policy": "fixed", "lengths": "turbogr-kuai", "ranks": 16, "imbalance": 0.4701,
     "max_token_gap": 10_726},
    {"system": "TurboGR Table 3", "policy": "greedy", "lengths": "turbogr-kuai", "ranks": 16, "imbalance": 0.0240,
     "max_token_gap": 559},
    {"system": "TurboGR Table 3", "policy": "fixed", "lengths": "amazon-like", "ranks": 16, "imbalance": 0.0355,
     "max_token_gap": 623},
    {"system": "TurboGR Table 3", "policy": "token_threshold", "lengths": "amazon-like", "ranks": 16,
     "imbalance": 0.0148, "max_token_gap": 31},
    {"system": "FreeScale", "policy": "fixed", "lengths": "freescale", "ranks": 64, "batch": 128, "straggler": 0.22},
    {"system": "FreeScale", "policy": "zigzag", "lengths": "freescale", "ranks": 64, "batch": 128, "straggler": 0.024},
)  # fmt: skip
"""Waiting times that the authors of the papers measured on their own machines and data. They are not directly
comparable with the predicted figures."""


def run(lengths: str, ranks: int, batch: int, *, seed: int = 0, rounds: int = 50, micro_batches: int = 4) -> list[Row]:
    """Evaluate every cost model, policy and kind of noise in one setting.

    Args:
        lengths: A preset, a prepared dataset, or a file of lengths.
        ranks: Number of ranks.
        batch: Number of samples per rank.
        seed: Random seed of lengths, order and noise.
        rounds: Number of global batches.
        micro_batches: Number of micro-batches per rank.

    Returns:
        One row per combination; figures are means over the global batches.
    """
    for name, value in (("ranks", ranks), ("batch", batch), ("rounds", rounds), ("micro_batches", micro_batches)):
        require(value >= 1, "must be at least 1", option=name, value=value, remedy="set a positive number")
    tokens = global_batches(lengths, ranks * batch, seed=seed, rounds=rounds)
    common = {"lengths": lengths, "ranks": ranks, "batch": batch, "rounds": rounds, "micro_batches": micro_batches}
    rows = []
    for cost_name, model in COSTS.items():
        floors = _floors([model.sample_costs(lengths_of_batch) for lengths_of_batch in tokens], ranks)
        for policy in POLICIES:
            for figures in _evaluate(policy, model, tokens, ranks, seed, micro_batches):
                floor = floors[figures["noise"]]
                rows.append({"policy": policy, "cost": cost_name, **common, **figures, "noise_floor": floor})
    return rows


def run_settings(*, seed: int = 0, rounds: int = 50, measured_rounds: int = 0) -> list[Row]:
    """Return rows for the settings of the published tables, each followed by the published rows, and measured rows."""
    rows = []
    for lengths, ranks, batch in SETTINGS:
        rows += run(lengths, ranks, batch, seed=seed, rounds=rounds) + published(lengths, ranks)
    rows = with_unique_keys(rows, unique_key_rows("turbogr-kuai", 16, 8, seed=seed))
    for ranks in MEASURED_RANKS if measured_rounds else ():
        rows += measure(MeasuredBalanceConfig(ranks=ranks, rounds=measured_rounds, seed=seed))
    return rows


def run_one(  # noqa: PLR0917
    lengths: str, ranks: int, batch: int, seed: int = 0, rounds: int = 50, measured_rounds: int = 30
) -> list[Row]:
    """Evaluate one setting, including the figures that need samples instead of only their lengths.

    These are the numbers of unique keys and, for few ranks, the figures of real training.
    """
    rows = run(lengths, ranks, batch, seed=seed, rounds=rounds)
    if lengths not in PRESETS and not Path(lengths).is_dir():
        return rows
    rows = with_unique_keys(rows, unique_key_rows(lengths, ranks, batch, seed=seed))
    if measured_rounds and 1 < ranks <= max(MEASURED_RANKS):
        rows += measure(
            MeasuredBalanceConfig(lengths=lengths, ranks=ranks, batch=batch, rounds=measured_rounds, seed=seed)
        )
    return rows


def published(lengths: str, ranks: int) -> list[Row]:
    """Return the published rows for a setting."""
    rows = [row for row in PUBLISHED if (row["lengths"], row["ranks"]) == (lengths, ranks)]
    unknown = dict.fromkeys(("batch", "imbalance", "straggler", "max_token_gap", "partition_ms"))
    return [{**unknown, **row, "noise": "unknown", "measured": True} for row in rows]


def global_batches(lengths: str, size: int, *, seed: int, rounds: int) -> NDArray[np.int64]:
    """Return the numbers of tokens of the samples of successive global batches in training order, (rounds, size)."""
    if lengths in PRESETS or lengths == AMAZON_LIKE.name:
        shape = PRESETS.get(lengths, AMAZON_LIKE)
        return draw_lengths(shape, size * rounds, seed).astype(np.int64).reshape(rounds, size)
    all_lengths = read_lengths(Path(lengths))
    epochs = -(-size * rounds // all_lengths.size)
    order = np.concatenate([epoch_order(all_lengths.size, seed, epoch) for epoch in range(epochs)])
    batches: NDArray[np.int64] = all_lengths[order[: size * rounds]].reshape(rounds, size)
    return batches


def read_lengths(path: Path) -> NDArray[np.int64]:
    """Return the lengths of a prepared dataset (a folder), a `.npy` array, or a text file with one number per line."""
    if not path.exists():
        remedy = did_you_mean(str(path), [*PRESETS, AMAZON_LIKE.name]) + " Or name a file of lengths or a dataset"
        raise UserError("this is neither a preset nor a file", option="lengths", value=str(path), remedy=remedy)
    if path.is_dir():
        found = Dataset.open(path, columns=[]).lengths.astype(np.int64)
    elif path.suffix == ".npy":
        found = np.load(path, allow_pickle=False).reshape(-1).astype(np.int64)
    else:
        found = np.loadtxt(path, dtype=np.int64, ndmin=1)
    if found.size == 0 or found.min() < 0:
        remedy = "write one number per line, none negative"
        raise UserError("the file does not contain valid lengths", option="lengths", value=str(path), remedy=remedy)
    return found


def _evaluate(  # noqa: PLR0917
    policy: str, model: CostModel, tokens: NDArray[np.int64], ranks: int, seed: int, micro_batches: int
) -> list[Row]:
    """Return one row per kind of noise."""
    partition(policy, model.sample_costs(tokens[0]), ranks, lengths=tokens[0])  # compiles before the timed calls
    found: dict[str, list[BalanceMetrics]] = {noise: [] for noise in NOISES}
    partition_ms = []
    cpu_ms = []
    windows = []
    for number, lengths in enumerate(tokens):
        cost = model.sample_costs(lengths)
        start = time.perf_counter()
        cpu_start = time.thread_time()
        groups = partition(policy, cost, ranks, lengths=lengths)
        partition_ms.append((time.perf_counter() - start) * 1e3)
        cpu_ms.append((time.thread_time() - cpu_start) * 1e3)
        windows.append(_window(cost, groups, micro_batches))
        for noise, draw in NOISES.items():
            factors = draw(cost.size, NOISE, fold(seed, number))
            found[noise].append(compute_balance_metrics(groups, lengths, cost * factors, step_cost=model.step))
    common = {
        "partition_ms": float(np.median(partition_ms)),
        "partition_cpu_ms": float(np.median(cpu_ms)),
        "window_imbalance": float(np.mean(windows)),
    }
    return [{"noise": noise, **_means(steps), **common, "measured": False} for noise, steps in found.items()]


def _means(steps: list[BalanceMetrics]) -> Row:
    return {
        "imbalance": float(np.mean([step.imbalance for step in steps])),
        "worst_imbalance": max(step.imbalance for step in steps),
        "straggler": float(np.mean([step.straggler for step in steps])),
        "max_token_gap": float(np.mean([step.max_token_gap for step in steps])),
    }


def _window(cost: NDArray[np.float64], groups: Groups, micro_batches: int) -> float:
    """Return the predicted imbalance within a frozen window if each rank forms micro-batches of equal cost."""
    costs = [loads_of(cost[group], micro_partition(cost[group], micro_batches)) for group in groups]
    return window_imbalance(np.stack(costs))


def _floors(costs: Sequence[NDArray[np.float64]], ranks: int) -> dict[str, float]:
    """Return the approximate minimum imbalance of any policy, for each kind of noise."""
    deviations = {"none": 0.0, "uniform": NOISE / 3**0.5, "gaussian": NOISE}
    return {
        noise: float(np.mean([noise_floor(cost, ranks, deviation) for cost in costs]))
        for noise, deviation in deviations.items()
    }


@config
class BalanceBenchConfig:
    """Options of the benchmark."""

    lengths: str | None = None
    """Preset, dataset or file of lengths; by default, all published settings are evaluated."""
    ranks: Count = 16
    """Number of ranks, if `lengths` is set."""
    batch: Count = 128
    """Number of samples per rank, if `lengths` is set."""
    rounds: Count = 50
    """Number of global batches to average over."""
    seed: int = 0
    """Random seed of lengths, order and noise."""
    measured_rounds: Natural = 30
    """Number of global batches on which up to 4 real ranks train; 0 disables the measurement."""


def measure_balance(bench: BalanceBenchConfig) -> list[Row]:
    """Return the rows of all published settings, or those of the setting in the options."""
    if bench.lengths is None:
        return run_settings(seed=bench.seed, rounds=bench.rounds, measured_rounds=bench.measured_rounds)
    return run_one(bench.lengths, bench.ranks, bench.batch, bench.seed, bench.rounds, bench.measured_rounds)


def _show(rows: Sequence[Row], more: Mapping[str, Any]) -> list[OutputPart]:
    show_balance(rows)
    return []


BENCH = Bench(config=BalanceBenchConfig, measure=measure_balance, show=_show)
