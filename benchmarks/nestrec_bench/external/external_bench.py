"""Compare nestrec with TorchRec: both systems train the same job alternately, in the same two processes.

nestrec uses its serial schedule. TorchRec is installed in a separate environment (`make torchrec`), whose Python
interpreter runs both systems. Without it, only nestrec is measured.

    nestrec bench peers --dense mlp --rounds 15
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nestrec.base.config import config
from nestrec.base.errors import UserError, did_you_mean, require
from nestrec_bench.bench import Bench, OutputPart
from nestrec_bench.external.torchrec_job import TORCHREC_MODES
from nestrec_bench.external.training_job import DENSE_KINDS
from nestrec_bench.pages.peers_page import peers_page

NUM_RANKS = 2
_STEPS = {"mlp": 4, "bucket": 1}
# The steps of `bucket` are long and exchange little: a measurement over Gloo would take minutes without new results.
_MODES = {"mlp": ("serial", "serial_gloo"), "bucket": ("serial",)}
ENVIRONMENT = ".venv-torchrec"
HOW_TO_COMPARE = (
    f"TorchRec was not found: only nestrec is measured. To compare, create {ENVIRONMENT} by `make torchrec`."
)
_CHECK_IMPORTS = (
    "import importlib.util as u, sys; sys.exit(0 if u.find_spec('torchrec') and u.find_spec('nestrec') else 3)"
)


@config
class PeersBenchConfig:
    """Options of the benchmark."""

    dense: tuple[str, ...] = ("mlp", "bucket")
    """Dense parts of the model: `mlp`, with which the sparse path dominates, and `bucket`, a transformer."""
    rounds: int = 15
    """Number of rounds per system."""
    steps: int = 0
    """Number of steps per round; 0 selects 4 for `mlp` and 1 for `bucket`, whose steps are long."""
    modes: tuple[str, ...] = TORCHREC_MODES
    """TorchRec's plain training loop and training pipelines to compare with."""
    python: str | None = None
    """Python interpreter of an environment with TorchRec, if it is not in .venv-torchrec."""


def find_python(chosen: Path | None) -> Path | None:
    """Return the Python interpreter of an environment with TorchRec, or None if TorchRec is not installed.

    Args:
        chosen: Interpreter that the user chose; by default, that of `make torchrec` or the running one.

    Raises:
        UserError: The chosen interpreter does not have TorchRec and nestrec.
    """
    if chosen is not None:
        if subprocess.run([chosen, "-c", _CHECK_IMPORTS], check=False, capture_output=True).returncode:
            problem = "this Python cannot import torchrec and nestrec"
            remedy = "create an environment that has both by `make torchrec`, or name the Python of another one"
            raise UserError(problem, option="--python", value=str(chosen), remedy=remedy)
        return chosen
    for folder in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (interpreter := folder / ENVIRONMENT / "bin" / "python").exists():
            return interpreter
    return Path(sys.executable) if importlib.util.find_spec("torchrec") else None


def measure_peers(bench: PeersBenchConfig) -> Iterator[dict[str, Any]]:
    """Measure each dense part, system and mode, and yield one row each; only nestrec if TorchRec is not found."""
    _check(bench)
    python = find_python(None if bench.python is None else Path(bench.python))
    for dense in bench.dense:
        yield from _measure_dense(bench, dense, python)


def _measure_dense(bench: PeersBenchConfig, dense: str, python: Path | None) -> list[dict[str, Any]]:
    modes = [] if python is None else list(bench.modes)
    with tempfile.TemporaryDirectory(prefix="nestrec-peers-") as folder:
        output = Path(folder) / "rows.json"
        log = Path(folder) / "log"
        command = [
            str(python or sys.executable), "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(NUM_RANKS), "-m", "nestrec_bench.external.external_ranks", "--dense", dense,
            "--rounds", str(bench.rounds), "--steps", str(bench.steps or _STEPS[dense]), "--output", str(output),
            "--modes", *_MODES[dense], "--torchrec-modes", *modes,
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with log.open("wb") as stream:
            code = subprocess.run(command, env=environment, stdout=stream, stderr=stream, check=False).returncode
        if code:
            raise RuntimeError(f"the ranks exited with code {code}:\n{log.read_text(errors='replace')[-4000:]}")
        measured = json.loads(output.read_text())
    return rows_of(dense, measured)


def rows_of(dense: str, measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the result file.

    Ratios are the samples per second of nestrec, the first system, divided by those of the row. `paired_ratio` is the
    median over rounds of the ratio within a round; spreads are the quartiles over rounds. `cpu_ms` is the CPU time per
    step and rank in all threads. `parts_ms`, which only nestrec has, maps a stage to [time] in the training thread of
    rank 0.
    """
    nestrec_rates = measured[0]["samples_per_s_rounds"]
    rows = []
    for system in measured:
        rates = system["samples_per_s_rounds"]
        paired = [of_nestrec / of_system for of_nestrec, of_system in zip(nestrec_rates, rates, strict=True)]
        rows.append({
            "system": system["system"], "version": system["version"], "mode": system["mode"], "dense": dense,
            "samples_per_s": round(statistics.median(rates), 1), "samples_per_s_spread": _quartiles(rates, 1),
            "cpu_ms": system["cpu_ms"], "ratio": round(statistics.median(nestrec_rates) / statistics.median(rates), 3),
            "paired_ratio": round(statistics.median(paired), 3), "paired_ratio_spread": _quartiles(paired, 3),
            "losses": system["losses"], "samples_per_s_rounds": rates,
            "parts_ms": system["parts_ms"],
        })  # fmt: skip
    return rows


def short_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the columns that fit a terminal; quartiles over rounds are in brackets."""
    return [
        {
            "system": f"{row['system']} {row['mode']}",
            "dense": row["dense"],
            "samples/s": "{:.0f} [{:.0f}, {:.0f}]".format(row["samples_per_s"], *row["samples_per_s_spread"]),
            "CPU ms": row["cpu_ms"],
            "ratio per round": "{:.2f} [{:.2f}, {:.2f}]".format(row["paired_ratio"], *row["paired_ratio_spread"]),
            "last loss": f"{row['losses'][-1]:.6f}",
        }
        for row in rows
    ]


def write_page(path: Path, frame: Mapping[str, Any]) -> None:
    """Write the tables into a page, and retain the text around them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(peers_page(frame, path.read_text() if path.exists() else None))


def _quartiles(values: Sequence[float], digits: int) -> list[float]:
    if len(values) == 1:
        return [round(values[0], digits)] * 2
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [round(low, digits), round(high, digits)]


def _check(bench: PeersBenchConfig) -> None:
    known = {
        **{f"dense[{i}]": (d, DENSE_KINDS) for i, d in enumerate(bench.dense)},
        **{f"modes[{i}]": (m, TORCHREC_MODES) for i, m in enumerate(bench.modes)},
    }
    for name, (value, names) in known.items():
        if value not in names:
            raise UserError("unknown value", option=name, value=value, remedy=did_you_mean(value, names))
    for name, number, minimum in (("rounds", bench.rounds, 1), ("steps", bench.steps, 0)):
        problem = f"must be at least {minimum}"
        require(number >= minimum, problem, option=name, value=number, remedy="set a larger number")


def _show(rows: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> Iterator[OutputPart]:
    if all(row["system"] == "nestrec" for row in rows):
        yield HOW_TO_COMPARE
    yield "peers [quartiles over rounds]; ratio: nestrec / system of the row", short_rows(rows)


BENCH = Bench(config=PeersBenchConfig, measure=measure_peers, show=_show, page=write_page)
