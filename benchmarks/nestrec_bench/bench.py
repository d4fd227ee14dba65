"""Interface of benchmarks, and the registry of all benchmarks by name.

A benchmark consists of options, a measurement that returns result rows, and their presentation. Other packages add
benchmarks by entry points of the group `nestrec.benches`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestrec.base.plugins import PluginRegistry

Row = dict[str, Any]
ExtraFields = Mapping[str, Any]
"""Fields of a result file in addition to its rows."""
OutputPart = str | tuple[str, Sequence[Mapping[str, Any]]]
"""A line of text, or a table: its title and its rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A benchmark, run by `nestrec bench NAME`: its options, measurement, tables and result file.

    The docstring of the module that defines the benchmark is the help of the command; its first line is printed in the
    list of benchmarks.
    """

    config: type
    """Config class whose fields are the options of the benchmark."""
    measure: Callable[[Any], Iterable[Row]]
    """Function that measures and returns the result rows. Each row is written to the result file immediately, so that
    an interrupted run keeps its rows. A generator may return a mapping with further fields of the result file;
    `hardware` is one of them if the rows were measured on other machines."""
    show: Callable[[Sequence[Row], ExtraFields], Iterable[OutputPart]] | None = None
    """Function that returns the lines and tables to print; by default, one table of all rows."""
    progress_line: Callable[[Row], str] | None = None
    """Function that returns the progress line to print after each row."""
    is_emulated: Callable[[Any], bool] = lambda config: False
    """Function that returns whether a device or link is emulated."""
    page: Callable[[Path, Mapping[str, Any]], None] | None = None
    """Function that writes a documentation page from the content of a result file."""
    argument: str | None = None
    """Name of the field that is set by positional arguments: `nestrec bench quality runs/a runs/b`."""


BENCHES: PluginRegistry[Bench] = PluginRegistry(
    "nestrec.benches",
    "benchmark",
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
