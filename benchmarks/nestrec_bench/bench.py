"""What a benchmark is: options, a measurement that gives rows, and how they are shown.

The benchmarks by name. Those of other packages come by entry points of `nestrec.benches`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestrec.base.plugins import PluginRegistry

Row = dict[str, Any]
More = Mapping[str, Any]
"""What a result file holds beside its rows."""
Shown = str | tuple[str, Sequence[Mapping[str, Any]]]
"""A line, or a table under its title."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A benchmark. `nestrec bench NAME` makes a command of it: options, table, result file.

    The docstring of the module that holds it is the command's help; its first line stands in the list of benches.
    """

    config: type
    """a config whose fields are the options"""
    measure: Callable[[Any], Iterable[Row]]
    """rows, each written into the result file as it comes: a run that is cut keeps what it has. A generator may return
    a mapping: what the result file holds beside its rows, or `hardware` where others than this machine measured"""
    show: Callable[[Sequence[Row], More], Iterable[Shown]] | None = None
    """lines and tables for people; without it, all rows under the bench's name"""
    said: Callable[[Row], str] | None = None
    """a line to print as a row comes"""
    is_emulated: Callable[[Any], bool] = lambda config: False
    """whether some device or link is not real"""
    page: Callable[[Path, Mapping[str, Any]], None] | None = None
    """writes a page from the content of a result file"""
    argument: str | None = None
    """the field that is given by bare words: `nestrec bench quality runs/a runs/b`"""


BENCHES: PluginRegistry[Bench] = PluginRegistry(
    "nestrec.benches",
    "bench",
    {
        "attention": "nestrec_bench.kernels.attention_bench:BENCH",
        "balance": "nestrec_bench.balance.balance_bench:BENCH",
        "calibrate": "nestrec_bench.planning.calibrate_bench:BENCH",
        "choices": "nestrec_bench.quality.choices_bench:BENCH",
        "features": "nestrec_bench.quality.features_bench:BENCH",
        "clustering": "nestrec_bench.balance.clustering_bench:BENCH",
        "engine": "nestrec_bench.serving.engine_step_bench:BENCH",
        "evaluations": "nestrec_bench.quality.evaluations_bench:BENCH",
        "exchange": "nestrec_bench.kernels.exchange_bench:BENCH",
        "fresh": "nestrec_bench.quality.fresh_bench:BENCH",
        "front": "nestrec_bench.serving.front_bench:BENCH",
        "host": "nestrec_bench.step.host_bench:BENCH",
        "layer": "nestrec_bench.kernels.layer_bench:BENCH",
        "lookup": "nestrec_bench.kernels.lookup_bench:BENCH",
        "negatives": "nestrec_bench.step.negatives_bench:BENCH",
        "overload": "nestrec_bench.serving.overload_bench:BENCH",
        "papers": "nestrec_bench.planning.papers_bench:BENCH",
        "peers": "nestrec_bench.external.external_bench:BENCH",
        "prediction": "nestrec_bench.planning.prediction_bench:BENCH",
        "prepare": "nestrec_bench.quality.prepare_bench:BENCH",
        "quality": "nestrec_bench.quality.quality_bench:BENCH",
        "relay": "nestrec_bench.serving.relay_bench:BENCH",
        "retrieval": "nestrec_bench.serving.retrieval_bench:BENCH",
        "schedules": "nestrec_bench.schedules.schedules_bench:BENCH",
        "simulator": "nestrec_bench.planning.simulator_bench:BENCH",
        "sparse": "nestrec_bench.schedules.sparse_bench:BENCH",
        "step": "nestrec_bench.step.step_bench:BENCH",
        "stores": "nestrec_bench.kernels.stores_bench:BENCH",
    },
    of=Bench,
)
