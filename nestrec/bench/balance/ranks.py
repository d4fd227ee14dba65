"""The measured part of `nestrec bench balance`: a small HSTU trained by real ranks, policies taking turns on a batch.

Every global batch is trained on once under each policy, in alternating order, so that policies meet the same batches
and the same disturbances; figures are medians. Waiting at a collective is what a rank spends in it beyond the last rank
to enter. Where ranks share cores, wall times say little of waiting: a rank that waits lends its core to others. So the
processor time of forward and backward passes is reported too, which does not depend on who else runs.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.measured import waiting
from nestrec.balance.metrics import imbalance, straggler
from nestrec.base.config import to_plain
from nestrec.base.parallel import usable_cores
from nestrec.bench.balance.job import COMMUNICATORS, MeasuredBench, measure_rank
from nestrec.data.synthetic.logs import generate, preset
from nestrec.distributed.local_ranks import run_on_ranks

Row = dict[str, Any]
Floats = NDArray[np.float64]
FIGURES = ("step_s", "compute_s", "cpu_s", "data_wait_s")


def measure(bench: MeasuredBench) -> list[Row]:
    """A row for each policy, measured in one run of `bench.ranks` processes."""
    with tempfile.TemporaryDirectory(prefix="nestrec-balance-") as folder:
        data = bench.lengths if Path(bench.lengths).is_dir() else str(Path(folder) / "data")
        if not Path(bench.lengths).is_dir():
            num_samples = bench.ranks * bench.batch * (bench.rounds + bench.fit_rounds)
            generate(preset(bench.lengths, num_users=num_samples, num_items=bench.num_items), Path(data))
        ranks = run_on_ranks(bench.ranks, measure_rank, to_plain(bench), data)
    baseline = _table(ranks, bench.policies[0])
    return [_row(bench, policy, ranks, baseline) for policy in bench.policies]


def _table(ranks: Sequence[Mapping[str, Any]], policy: str) -> dict[str, Floats]:
    """(R, S) of each figure, and (S,) the mean over ranks of the time waited at collectives."""
    table = {name: np.array([[s[name] for s in rank["steps"][policy]] for rank in ranks]) for name in FIGURES}
    num_ranks, num_steps = table["step_s"].shape
    waited = np.zeros(num_steps)
    for step in range(num_steps):
        for name in COMMUNICATORS:
            durations = [rank["steps"][policy][step]["durations_ns"][name] for rank in ranks]
            waited[step] += waiting(durations, [range(num_ranks)]).sum() * 1e-9
    return {**table, "waited_s": waited}


def _row(bench: MeasuredBench, policy: str, ranks: Sequence[Mapping[str, Any]], baseline: Mapping[str, Floats]) -> Row:
    table, first = _table(ranks, policy), ranks[0]
    steps = first["steps"][policy]
    step_s, cpu_max = table["step_s"].mean(axis=0), table["cpu_s"].max(axis=0)
    speedup = baseline["step_s"].mean(axis=0) / step_s
    speedup_cpu = baseline["cpu_s"].max(axis=0) / cpu_max
    idle = [straggler(busy, float(whole)) for busy, whole in zip(table["compute_s"].T, step_s, strict=True)]
    return {
        "policy": policy,
        "lengths": bench.lengths,
        "ranks": bench.ranks,
        "batch": bench.batch,
        "measured": True,
        "noise": "real",
        "cores": usable_cores(),
        "mode": bench.mode,
        "rounds": bench.rounds,
        "cost": first["cost"],
        **_spread("imbalance", table["waited_s"] / step_s),
        **_spread("straggler", idle),
        **_spread("cpu_imbalance", [imbalance(busy) for busy in table["cpu_s"].T]),
        **_spread("step_ms", step_s * 1e3),
        **_spread("compute_cpu_max_ms", cpu_max * 1e3),
        **_spread("speedup", speedup),
        **_spread("speedup_cpu", speedup_cpu),
        **_spread("data_wait_ms", table["data_wait_s"].mean(axis=0) * 1e3),
        "max_token_gap": float(np.mean([step["max_token_gap"] for step in steps])),
        "predicted_imbalance": float(np.mean([step["predicted_imbalance"] for step in steps])),
        "moved_bytes": float(np.mean([step["moved_bytes"] for step in steps])),
        **first["data"][policy],
    }


def _spread(name: str, values: Sequence[float] | Floats) -> Row:
    """Median and quartiles."""
    low, middle, high = np.percentile(np.asarray(values, dtype=np.float64), [25, 50, 75]).tolist()
    return {name: middle, f"{name}_quartiles": [low, high]}
