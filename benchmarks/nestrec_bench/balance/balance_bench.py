"""Every balance policy on the same global batches, beside what the papers print.

Predicted means (max - mean) / max of the cost of the ranks, where the cost of a sample comes from the cost model, or
from the cost model times noise that the policy cannot foresee. Two models are used: `tokens` counts tokens, with
which the fixed baseline on `freescale` lengths comes closest to FreeScale's own; `hstu-1024` counts the FLOPs of HSTU
with 8 heads of 128 (TurboGR's large model), a * L + b * L^2 with b / a = 1 / 5120.

    nestrec bench balance --lengths turbogr-kuai --ranks 16 --batch 128
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance import POLICIES, TOKENS, CostModel, hstu_cost, micro_partition, partition
from nestrec.balance.balance_metrics import BalanceMetrics, evenness, noise_floor, noise_gaussian, noise_uniform
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
from nestrec_bench.balance.balance_job import MeasuredBench, measure
from nestrec_bench.balance.unique_keys import unique_key_rows, with_unique_keys
from nestrec_bench.bench import Bench, Shown
from nestrec_bench.pages.balance_tables import show_balance

Row = dict[str, Any]

COSTS: dict[str, CostModel] = {
    "tokens": TOKENS,
    "hstu-1024": hstu_cost(dim=1024, num_heads=8, head_dim=128, num_layers=16),
}
NOISE = 0.1
"""Size of the noise: half width where uniform, standard deviation where gaussian."""
NOISES: dict[str, Callable[[int, float, int], NDArray[np.float64]]] = {
    "none": lambda num_samples, amount, seed: np.ones(num_samples),
    "uniform": noise_uniform,
    "gaussian": noise_gaussian,
}

AMAZON_LIKE = SyntheticConfig(
    name="amazon-like", num_users=22_363, num_items=12_101, ln_mean=2.02, ln_sd=0.49, max_length=204
)
"""Lengths of Amazon Beauty, 5-core."""

SETTINGS = (("turbogr-kuai", 16, 8), ("amazon-like", 16, 1024), ("freescale", 64, 128), ("freescale", 256, 128))
"""(lengths, ranks, samples a rank). TurboGR does not print Amazon's batch; 1024 gives close to its token gap."""

MEASURED_RANKS = (2, 4)
"""Numbers of real ranks on one machine."""

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
"""Waiting that the papers measured on their own machines and data; ours is predicted, another quantity."""


def run(lengths: str, ranks: int, batch: int, *, seed: int = 0, rounds: int = 50, micro_batches: int = 4) -> list[Row]:
    """Rows of one setting: cost models times policies times noise, each a mean over `rounds` global batches.

    lengths: a preset, a prepared dataset, or a file of lengths. ranks: number of ranks. batch: samples a rank.
    """
    for name, value in (("ranks", ranks), ("batch", batch), ("rounds", rounds), ("micro_batches", micro_batches)):
        require(value >= 1, "must be at least 1", option=name, value=value, remedy="give a positive number")
    tokens = global_batches(lengths, ranks * batch, seed=seed, rounds=rounds)
    common = {"lengths": lengths, "ranks": ranks, "batch": batch, "rounds": rounds, "micro_batches": micro_batches}
    rows = []
    for cost_name, model in COSTS.items():
        floors = _floors([model.of(lengths_of_batch) for lengths_of_batch in tokens], ranks)
        for policy in POLICIES:
            for figures in _evaluate(policy, model, tokens, ranks, seed, micro_batches):
                floor = floors[figures["noise"]]
                rows.append({"policy": policy, "cost": cost_name, **common, **figures, "noise_floor": floor})
    return rows


def run_settings(*, seed: int = 0, rounds: int = 50, measured_rounds: int = 0) -> list[Row]:
    """The settings of the published tables, each with the published rows behind it, and those of real ranks."""
    rows = []
    for lengths, ranks, batch in SETTINGS:
        rows += run(lengths, ranks, batch, seed=seed, rounds=rounds) + published(lengths, ranks)
    rows = with_unique_keys(rows, unique_key_rows("turbogr-kuai", 16, 8, seed=seed))
    for ranks in MEASURED_RANKS if measured_rounds else ():
        rows += measure(MeasuredBench(ranks=ranks, rounds=measured_rounds, seed=seed))
    return rows


def run_one(  # noqa: PLR0917
    lengths: str, ranks: int, batch: int, seed: int = 0, rounds: int = 50, measured_rounds: int = 30
) -> list[Row]:
    """`run`, and what needs samples and not only their lengths: unique keys and, for few ranks, real training."""
    rows = run(lengths, ranks, batch, seed=seed, rounds=rounds)
    if lengths not in PRESETS and not Path(lengths).is_dir():
        return rows
    rows = with_unique_keys(rows, unique_key_rows(lengths, ranks, batch, seed=seed))
    if measured_rounds and 1 < ranks <= max(MEASURED_RANKS):
        rows += measure(MeasuredBench(lengths=lengths, ranks=ranks, batch=batch, rounds=measured_rounds, seed=seed))
    return rows


def published(lengths: str, ranks: int) -> list[Row]:
    """What the papers print for this setting."""
    rows = [row for row in PUBLISHED if (row["lengths"], row["ranks"]) == (lengths, ranks)]
    unknown = dict.fromkeys(("batch", "imbalance", "straggler", "max_token_gap", "partition_ms"))
    return [{**unknown, **row, "noise": "unknown", "measured": True} for row in rows]


def global_batches(lengths: str, size: int, *, seed: int, rounds: int) -> NDArray[np.int64]:
    """(rounds, size) tokens of the samples of successive global batches, in the order of training."""
    if lengths in PRESETS or lengths == AMAZON_LIKE.name:
        shape = PRESETS.get(lengths, AMAZON_LIKE)
        return draw_lengths(shape, size * rounds, seed).astype(np.int64).reshape(rounds, size)
    every = read_lengths(Path(lengths))
    epochs = -(-size * rounds // every.size)
    order = np.concatenate([epoch_order(every.size, seed, epoch) for epoch in range(epochs)])
    batches: NDArray[np.int64] = every[order[: size * rounds]].reshape(rounds, size)
    return batches


def read_lengths(path: Path) -> NDArray[np.int64]:
    """Lengths of a prepared dataset (a folder), of a `.npy` array, or of a text file with one number a line."""
    if not path.exists():
        remedy = did_you_mean(str(path), [*PRESETS, AMAZON_LIKE.name]) + " Or give a file of lengths or a dataset."
        raise UserError("is neither a preset nor a file", option="lengths", value=str(path), remedy=remedy)
    if path.is_dir():
        every = Dataset.open(path, columns=[]).lengths.astype(np.int64)
    elif path.suffix == ".npy":
        every = np.load(path, allow_pickle=False).reshape(-1).astype(np.int64)
    else:
        every = np.loadtxt(path, dtype=np.int64, ndmin=1)
    if every.size == 0 or every.min() < 0:
        remedy = "give one number a line, none negative"
        raise UserError("holds no lengths", option="lengths", value=str(path), remedy=remedy)
    return every


def _evaluate(  # noqa: PLR0917
    policy: str, model: CostModel, tokens: NDArray[np.int64], ranks: int, seed: int, micro_batches: int
) -> list[Row]:
    """One row for each kind of noise."""
    partition(policy, model.of(tokens[0]), ranks, lengths=tokens[0])  # compiles
    found: dict[str, list[BalanceMetrics]] = {noise: [] for noise in NOISES}
    partition_ms, cpu_ms, windows = [], [], []
    for number, lengths in enumerate(tokens):
        cost = model.of(lengths)
        start = time.perf_counter()
        cpu_start = time.thread_time()
        groups = partition(policy, cost, ranks, lengths=lengths)
        partition_ms.append((time.perf_counter() - start) * 1e3)
        cpu_ms.append((time.thread_time() - cpu_start) * 1e3)
        windows.append(_window(cost, groups, micro_batches))
        for noise, draw in NOISES.items():
            factors = draw(cost.size, NOISE, fold(seed, number))
            found[noise].append(evenness(groups, lengths, cost * factors, step_cost=model.step))
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
    """Predicted waiting inside a frozen window when each rank cuts its samples into equal micro-batches."""
    costs = [loads_of(cost[group], micro_partition(cost[group], micro_batches)) for group in groups]
    return window_imbalance(np.stack(costs))


def _floors(costs: Sequence[NDArray[np.float64]], ranks: int) -> dict[str, float]:
    """About what no policy can go below under each kind of noise."""
    deviations = {"none": 0.0, "uniform": NOISE / 3**0.5, "gaussian": NOISE}
    return {
        noise: float(np.mean([noise_floor(cost, ranks, deviation) for cost in costs]))
        for noise, deviation in deviations.items()
    }


@config
class BalanceBench:
    lengths: str | None = None
    """preset, dataset or file of lengths; none: all published settings"""
    ranks: Count = 16
    """ranks, where lengths are given"""
    batch: Count = 128
    """samples a rank, where lengths are given"""
    rounds: Count = 50
    """global batches to average over"""
    seed: int = 0
    """of lengths, order and noise"""
    measured_rounds: Natural = 30
    """global batches trained on by real ranks, of up to 4 ranks; 0 trains none"""


def measure_balance(bench: BalanceBench) -> list[Row]:
    """The rows of the settings of the papers, or of one."""
    if bench.lengths is None:
        return run_settings(seed=bench.seed, rounds=bench.rounds, measured_rounds=bench.measured_rounds)
    return run_one(bench.lengths, bench.ranks, bench.batch, bench.seed, bench.rounds, bench.measured_rounds)


def _show(rows: Sequence[Row], more: Mapping[str, Any]) -> list[Shown]:
    show_balance(rows)
    return []


BENCH = Bench(config=BalanceBench, measure=measure_balance, show=_show)
