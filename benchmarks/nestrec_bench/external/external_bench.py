"""The same job through our serial schedule and through TorchRec, by turns in the same two processes.

TorchRec lives in an environment of its own (`make torchrec`), whose Python then runs both systems. Without it, our side
runs alone.

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
from nestrec_bench.bench import Bench, Shown
from nestrec_bench.external.torchrec_job import TORCHREC_MODES
from nestrec_bench.external.training_job import DENSE_KINDS
from nestrec_bench.pages.peers_page import peers_page

NUM_RANKS = 2
_STEPS = {"mlp": 4, "bucket": 1}
# The steps of `bucket` are long and hardly exchange: over Gloo they would cost minutes and tell nothing.
_MODES = {"mlp": ("serial", "serial_gloo"), "bucket": ("serial",)}
ENVIRONMENT = ".venv-torchrec"
HOW_TO_COMPARE = f"TorchRec was not found, so nestrec runs alone; `make torchrec` makes {ENVIRONMENT} for a comparison"
_IS_THERE = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('torchrec') and u.find_spec('nestrec') else 3)"


@config
class PeersBench:
    """What is measured."""

    dense: tuple[str, ...] = ("mlp", "bucket")
    """Dense parts: `mlp`, where the sparse path dominates, `bucket`, a transformer."""
    rounds: int = 15
    """Rounds of each system."""
    steps: int = 0
    """Steps of a round; 0: 4 for `mlp`, 1 for `bucket`, whose steps are long."""
    modes: tuple[str, ...] = TORCHREC_MODES
    """TorchRec's plain loop and pipelines to compare with."""
    python: str | None = None
    """Python that has TorchRec, if not that of .venv-torchrec"""


def find_python(given: Path | None) -> Path | None:
    """The Python that has TorchRec: the one given, that of `make torchrec`, or this one; none where it is nowhere."""
    if given is not None:
        if subprocess.run([given, "-c", _IS_THERE], check=False, capture_output=True).returncode:
            remedy = "give the Python of an environment that has torchrec and nestrec: `make torchrec` makes one"
            raise UserError("does not import torchrec and nestrec", option="--python", value=str(given), remedy=remedy)
        return given
    for folder in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (made := folder / ENVIRONMENT / "bin" / "python").exists():
            return made
    return Path(sys.executable) if importlib.util.find_spec("torchrec") else None


def measure_peers(bench: PeersBench) -> Iterator[dict[str, Any]]:
    """A row for each dense part, system and mode; our side alone where TorchRec is not found."""
    _check(bench)
    python = find_python(None if bench.python is None else Path(bench.python))
    for dense in bench.dense:
        yield from _measure_dense(bench, dense, python)


def _measure_dense(bench: PeersBench, dense: str, python: Path | None) -> list[dict[str, Any]]:
    modes = [] if python is None else list(bench.modes)
    with tempfile.TemporaryDirectory(prefix="nestrec-peers-") as folder:
        output, log = Path(folder) / "rows.json", Path(folder) / "log"
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
            raise RuntimeError(f"the ranks ended with code {code}:\n{log.read_text(errors='replace')[-4000:]}")
        measured = json.loads(output.read_text())
    return rows_of(dense, measured)


def rows_of(dense: str, measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the result file. Ratios are the samples a second of nestrec, the first system, over those of the row.

    `paired_ratio` is the median over rounds of the ratio within a round; spreads are the quartiles of rounds; `cpu_ms`
    is the processor time of a step and rank in all threads. `parts_ms`, of nestrec alone, is stage to [time] on
    rank 0 in the thread that trains.
    """
    ours = measured[0]["samples_per_s_rounds"]
    rows = []
    for system in measured:
        rates = system["samples_per_s_rounds"]
        paired = [mine / theirs for mine, theirs in zip(ours, rates, strict=True)]
        rows.append({
            "system": system["system"], "version": system["version"], "mode": system["mode"], "dense": dense,
            "samples_per_s": round(statistics.median(rates), 1), "samples_per_s_spread": _quartiles(rates, 1),
            "cpu_ms": system["cpu_ms"], "ratio": round(statistics.median(ours) / statistics.median(rates), 3),
            "paired_ratio": round(statistics.median(paired), 3), "paired_ratio_spread": _quartiles(paired, 3),
            "losses": system["losses"], "samples_per_s_rounds": rates,
            "parts_ms": system["parts_ms"],
        })  # fmt: skip
    return rows


def short_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What fits a terminal; brackets hold quartiles of rounds."""
    return [
        {
            "system": f"{row['system']} {row['mode']}",
            "dense": row["dense"],
            "samples/s": "{:.0f} [{:.0f}, {:.0f}]".format(row["samples_per_s"], *row["samples_per_s_spread"]),
            "CPU ms": row["cpu_ms"],
            "ratio in a round": "{:.2f} [{:.2f}, {:.2f}]".format(row["paired_ratio"], *row["paired_ratio_spread"]),
            "last loss": f"{row['losses'][-1]:.6f}",
        }
        for row in rows
    ]


def write_page(path: Path, frame: Mapping[str, Any]) -> None:
    """Put the tables into a page; what stands around them is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(peers_page(frame, path.read_text() if path.exists() else None))


def _quartiles(values: Sequence[float], digits: int) -> list[float]:
    if len(values) == 1:
        return [round(values[0], digits)] * 2
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [round(low, digits), round(high, digits)]


def _check(bench: PeersBench) -> None:
    known = {
        **{f"dense[{i}]": (d, DENSE_KINDS) for i, d in enumerate(bench.dense)},
        **{f"modes[{i}]": (m, TORCHREC_MODES) for i, m in enumerate(bench.modes)},
    }
    for name, (value, names) in known.items():
        if value not in names:
            raise UserError("is not known", option=name, value=value, remedy=did_you_mean(value, names))
    for name, number, least in (("rounds", bench.rounds, 1), ("steps", bench.steps, 0)):
        require(number >= least, f"must be at least {least}", option=name, value=number, remedy="give a larger number")


def _show(rows: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> Iterator[Shown]:
    if all(row["system"] == "nestrec" for row in rows):
        yield HOW_TO_COMPARE
    yield "peers [quartiles of rounds]; ratio: nestrec over the row", short_rows(rows)


BENCH = Bench(config=PeersBench, measure=measure_peers, show=_show, page=write_page)
