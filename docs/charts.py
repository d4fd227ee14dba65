"""Draws the charts of pages from result files (`make results`).

Each function of `CHARTS` selects the values of one chart from `results/*.json`. Every chart is written twice to
`pictures/charts/`, for light and for dark pages: NAME-light.svg and NAME-dark.svg, with a transparent background. The
metadata of a file contains a digest of the chart's texts and values, so that a test finds outdated charts without
drawing them.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from chart_drawing import INK, Chart, Panel, Series, draw

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "pictures" / "charts"
DIGEST = re.compile(r"digest ([0-9a-f]{64})")

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Frame:
    """A result file."""

    content: dict[str, Any]

    def rows(self, field: str = "rows", /, **conditions: Any) -> list[Row]:
        """Return the rows with these values; a missing field equals None, and a tuple lists alternatives."""

        def fits(row: Row) -> bool:
            return all(
                row.get(name) in (value if isinstance(value, tuple) else (value,)) for name, value in conditions.items()
            )

        if not (found := [row for row in self.content[field] if fits(row)]):
            raise ValueError(f"{self.content['bench']}: no row has {conditions}")
        return found

    def row(self, **conditions: Any) -> Row:
        """Return the only row with these values."""
        (row,) = self.rows(**conditions)
        return row

    def footer(self, *runs: int, note: str = "") -> str:
        """Return the hardware and date of runs, which are numbers in `runs` of a joined file."""
        frames = [self.content["runs"][run] for run in runs] if runs else [self.content]
        words = dict.fromkeys(self._machine(frame["hardware"]) for frame in frames)
        dates = sorted({frame["date"][:10] for frame in frames})
        return (
            "; ".join(words) + f", {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}" + (f"; {note}" if note else "")
        )

    @staticmethod
    def _machine(hardware: dict[str, Any]) -> str:
        devices = hardware.get("gpus") or [hardware.get("device") or hardware["cpu"]]
        cores = hardware["cores"]
        count = " and ".join(map(str, cores)) if isinstance(cores, list) else cores
        return f"{', '.join(devices)}, {count} CPU cores"


def frame(name: str) -> Frame:
    """Read a result file."""
    return Frame(json.loads((DOCS / "results" / f"{name}.json").read_text()))


def peers_throughput() -> Chart:
    peers = frame("peers")
    names = {
        ("nestrec", "serial"): "nestrec",
        ("nestrec", "serial_gloo"): "nestrec, Gloo transport",
        ("torchrec", "plain"): "TorchRec, plain loop",
        ("torchrec", "sparse_dist"): "TorchRec, TrainPipelineSparseDist",
        ("torchrec", "sparse_dist_lite"): "TorchRec, TrainPipelineSparseDistLite",
    }
    panels = []
    for dense, title in {"mlp": "Embeddings dominate (MLP)", "bucket": "Transformer dominates"}.items():
        found = {(row["system"], row["mode"]): row for row in peers.rows(dense=dense)}
        rows = [found.get(key, {}) for key in names]
        spread = [tuple(row["samples_per_s_spread"]) if row else None for row in rows]
        series = Series("", [row.get("samples_per_s") for row in rows], spread)
        panels.append(
            Panel(
                [series],
                "samples/s (error bars: quartiles)",
                title=title,
                categories=list(names.values()),
                colors=[int(system != "nestrec") for system, _ in names],
            )
        )
    return Chart("Training throughput of the same job on CPUs", panels, peers.footer(note="2 ranks, 46 rounds"))


def kv_cache_p99() -> Chart:
    relay = frame("relay")
    size = {"history": 2048, "candidates": 256, "run": 0, "emulated": False}

    def line(label: str, mode: str, returning: float, *slos: float) -> Series:
        """Return P99 by rate over the load curve and the trials of searches with these SLOs."""
        measured = [row for row in relay.content["rows"] if "load" in row]
        rows = relay.rows(mode=mode, returning=returning, **size)
        trials = [trial for row in rows if row["slo_ms"] in slos for trial in row.get("tried", [])]
        trials += [row for row in measured if (row["mode"], row["returning"]) == (mode, returning)]
        points: dict[float, float] = {}
        for trial in sorted(trials, key=lambda trial: trial["rate"]):
            if trial["p99_ms"] is not None:
                points[trial["rate"]] = max(trial["p99_ms"], points.get(trial["rate"], 0.0))
        return Series(label, list(points.values()), x=list(points))

    slo = relay.rows(mode="full", **size)[0]["slo_ms"]
    panel = Panel(
        [
            line("Full inference", "full", 0.0, slo, 20.0, 80.0),
            line("Relay (KV cache), no returning users", "relay", 0.0, slo),
            line("Relay, 60% returning users", "relay", 0.6, slo),
        ],
        "offered load, requests/s",
        "P99 latency, ms",
        limit=(slo, f"SLO {slo:.1f} ms"),
        log_y=True,
    )
    note = "HSTU, 8 layers x 1024, 2,048 events (4,096 tokens), 256 candidates, bfloat16; load generator in the process"
    return Chart("P99 latency against offered load on one H200", [panel], relay.footer(0, note=note))


def kv_cache_throughput() -> Chart:
    """Largest rates of the relay and of full inference, in the process and over HTTP."""
    panels = []
    footers = []
    for name, runs, title in (("relay", (0, 1), "Load generator in the process"), ("serving", (0,), "Over HTTP")):
        file = frame(name)
        slos: dict[tuple[int, int], float] = {}
        for row in file.rows(mode="full", run=runs, returning=0.0):
            if row.get("max_qps") is not None:
                slos.setdefault((row["history"], row["candidates"]), row["slo_ms"])
        labels = {("full", 0.0): "Full inference"}
        labels |= {("relay", share): f"Relay, {share:.0%} returning" for share in (0.0, 0.3, 0.6)}
        series = []
        for (mode, returning), label in labels.items():
            rates: list[float | None] = []
            for (history, candidates), slo in slos.items():
                size = {"history": history, "candidates": candidates, "slo_ms": slo}
                rows = file.rows(mode=mode, returning=returning, run=runs, **size)
                rates.append(next(row["max_qps"] for row in rows if row.get("max_qps") is not None))
            series.append(Series(label, rates))
        categories = [f"{history:,} events,\n{candidates} candidates" for history, candidates in slos]
        panels.append(Panel(series, "largest rate within the SLO, requests/s", title=title, categories=categories))
        footers.append(file.footer(*runs))
    note = "HSTU, 8 layers x 1024; SLO: 3 x unloaded P50; 0: never met"
    footer = f"{'; '.join(dict.fromkeys(footers))}; {note}"
    return Chart("Ranking requests per second of one H200, by share of returning users", panels, footer)


def kv_cache_emulated() -> Chart:
    """Largest rates of the relay in simulated time."""
    file = frame("relay-emulated")
    sizes = [(history, candidates) for history in (2048, 4096) for candidates in (256, 512)]
    labels = {("full", 0.0): "Full inference"}
    labels |= {("relay", share): f"Relay, {share:.0%} returning" for share in (0.0, 0.3, 0.6)}
    series = []
    for (mode, returning), label in labels.items():
        rows = [
            file.rows(run=0, mode=mode, returning=returning, history=history, candidates=candidates)[0]
            for history, candidates in sizes
        ]
        series.append(Series(label, [row["max_qps"] for row in rows]))
    categories = [f"{history:,} events, {candidates} candidates" for history, candidates in sizes]
    panel = Panel(series, "largest rate within the SLO, requests/s", categories=categories)
    return Chart("Emulated: requests per second with the device times of an H200", [panel], file.footer(0))


def overload() -> Chart:
    file = frame("overload")
    loads = {"half": "half of the capacity", "2x": "2 times", "5x": "5 times", "10x": "10 times", "after": "afterwards"}
    series = []
    for field, label in (("goodput", "within the SLO"), ("rate", "offered")):
        values = []
        for load in loads:
            rates = [row[field] for row in file.rows(load=load)]
            values.append(sum(rates) / len(rates))
        series.append(Series(label, list(values)))
    panel = Panel(series, "requests/s (mean of rounds)", categories=list(loads.values()), decimals=1)
    return Chart("Requests within the SLO of 500 ms under overload, two CPU cores", [panel], file.footer())


LENGTHS = {
    "u1024": "1,024 tokens each",
    "u4096": "4,096 tokens each",
    "logn": "logn",
    "shortvid": "shortvid",
    "kuai1k": "kuai1k",
}


def attention_tflops() -> Chart:
    file = frame("kernels")
    systems = {
        "nestrec (HSTU)": {"impl": "nestrec", "run": 0},
        "torch flex_attention (softmax)": {"impl": "flex_attention", "run": 1},
        "torch varlen_attn (softmax)": {"impl": "varlen_attn", "run": 1},
        "torch SDPA, padded (softmax)": {"impl": "sdpa_padded", "run": 1},
        "eager HSTU, padded": {"impl": "eager_hstu_padded", "run": 1},
    }
    series = []
    for label, system in systems.items():
        rows = {row["lengths"]: row for row in file.rows(heads=4, dim=128, **system)}
        series.append(Series(label, [rows.get(length, {}).get("tflops") for length in LENGTHS]))
    panel = Panel(series, "TFLOP/s of exact causal attention, forward and backward", categories=list(LENGTHS.values()))
    note = "bf16, 131,072 tokens, 4 heads x 128; missing bars: out of memory"
    return Chart("Attention kernels on one H200, by lengths of sequences", [panel], file.footer(0, 1, note=note))


def attention_biases() -> Chart:
    file = frame("kernels")
    kinds = {
        "no bias": "nestrec",
        "position table": "nestrec_position_bias",
        "function of time": "nestrec_functional_time_bias",
        "position table and function": "nestrec_position_functional_bias",
        "position and time tables": "nestrec_position_time_bias",
    }
    series = []
    for label, impl in kinds.items():
        rows = {row["lengths"]: row for row in file.rows(run=0, heads=4, dim=128, impl=impl)}
        series.append(Series(label, [rows[length]["tflops"] for length in LENGTHS]))
    panel = Panel(series, "TFLOP/s, forward and backward", categories=list(LENGTHS.values()))
    return Chart("Attention with relative biases on one H200", [panel], file.footer(0, note="bf16, 4 heads x 128"))


def step_mfu() -> Chart:
    file = frame("step")
    cases = {
        "HSTU, 4,096 tokens each": ("hstu-8x128-u4096", "none"),
        "HSTU with tables, 4,096 tokens each": ("hstu-8x128-u4096", "tables"),
        "HSTU, lengths logn": ("hstu-8x128-logn", "none"),
        "HSTU with tables, lengths logn": ("hstu-8x128-logn", "tables"),
        "FuXi, 4,096 tokens each": ("fuxi-8x128-u4096", "tables"),
    }
    series = []
    for precision, runs in (("bf16", (2,)), ("fp8", (3, 4))):
        rows = [file.row(model=model, biases=biases, run=runs, precision=precision) for model, biases in cases.values()]
        series.append(Series(precision, [100 * row["mfu"] for row in rows]))
    panel = Panel(series, "MFU, % of the bf16 peak (989 TFLOP/s)", categories=list(cases), decimals=1)
    note = "complete training step of 131,072 tokens; fp8: projections only"
    return Chart("Model FLOPs utilization of training steps on one H200", [panel], file.footer(2, 3, 4, note=note))


def lookup_speed() -> Chart:
    file = frame("kernels-lookup")
    ops = {"gather": "gather", "deduplicate": "deduplicate", "learn": "deduplicate, sum and update", "update": "update"}
    series = []
    for zipf, label in ((0.0, "uniform keys"), (0.75, "Zipf 0.75"), (1.05, "Zipf 1.05")):
        rows = {
            row["op"]: row
            for row in file.rows(store="nestrec", keys=1048576, zipf=zipf, dtype="float32", op=tuple(ops))
        }
        series.append(Series(label, [rows[op]["of_best_torch"] for op in ops]))
    panel = Panel(series, "speed-up over the fastest plain torch", categories=list(ops.values()), decimals=2)
    return Chart("Embedding kernels on one H200, 1,048,576 keys", [panel], file.footer(note="float32 rows"))


def quality_ndcg() -> Chart:
    file = frame("quality")
    datasets = {
        "Amazon Beauty": ("beauty_hstu", "beauty_sasrec"),
        "MovieLens 100K": ("ml_100k_hstu", "ml_100k_sasrec"),
        "MovieLens 1M (order only)": ("ml_1m_ordered_hstu_large", "ml_1m_ordered_sasrec_large"),
    }
    series = []
    for number, model in enumerate(("HSTU", "SASRec")):
        rows = [file.row(recipe=recipes[number]) for recipes in datasets.values()]
        series.append(Series(model, [row["ndcg@10"] for row in rows], [tuple(row["ndcg@10_interval"]) for row in rows]))
    for baseline in ("last item", "popularity"):
        rows = [file.row(recipe=recipes[0]) for recipes in datasets.values()]
        series.append(Series(f"baseline: {baseline}", [row["baselines"][baseline]["ndcg@10"] for row in rows]))
    label = "NDCG@10 over the full catalog (error bars: 95% intervals over users)"
    panel = Panel(series, label, categories=list(datasets), decimals=3)
    note = "leave-one-out; means over 3 or 5 seeds"
    return Chart("Quality on public datasets", [panel], file.footer(note=note))


def quality_auto() -> Chart:
    file = frame("features")
    panels = []
    runs = set()
    names = {
        "AUC": {
            "kuairand": "KuaiRand",
            "criteo": "Criteo",
            "interests": "synthetic: interests",
            "long": "synthetic: long",
        },
        "NDCG@10": {
            "ml_1m": "MovieLens 1M",
            "ml_100k": "MovieLens 100K",
            "beauty": "Amazon Beauty",
            "taobao": "Taobao",
        },
    }
    for metric, datasets in names.items():
        series: dict[str, list[Row]] = {"train auto": [], "best baseline": []}
        for name in datasets:
            (auto,) = (
                row
                for row in file.rows(dataset=f"auto_{name}", part="all", inputs="auto")
                if row["metric"] in {"auc", "auc/click", "ndcg@10"}
            )
            rows = file.rows(dataset=f"auto_{name}", part="all", metric=auto["metric"], run=auto["run"])
            baselines = [row for row in rows if not row["inputs"].startswith(("auto", "recipe"))]
            series["train auto"].append(auto)
            series["best baseline"].append(max(baselines, key=lambda row: row["value"]))
            runs.add(auto["run"])
        shown = [
            Series(label, [row["value"] for row in rows], [(row["low"], row["high"]) for row in rows])
            for label, rows in series.items()
        ]
        start = 0.5 if metric == "AUC" else 0.0
        label = f"{metric} (95% intervals)"
        panels.append(Panel(shown, label, categories=list(datasets.values()), decimals=3, start=start))
    return Chart("train auto against the best baseline of each dataset", panels, file.footer(*sorted(runs)))


def nested_speedup() -> Chart:
    file = frame("nested")
    rows = {
        (row["schedule"], row["micro_batches"]): row["speedup"]
        for row in file.rows(run=0)
        if row["schedule"] != "serial"
    }
    labels = [f"{schedule}, N = {number}" for schedule, number in rows]
    colors = [int(schedule != "nested") for schedule, _ in rows]
    emulated = Panel(
        [Series("", list(rows.values()))],
        "speed-up over serial",
        title="One H200, 1,536 workers emulated",
        categories=labels,
        colors=colors,
        decimals=2,
    )
    links = {"2 ranks, 2 cores": 4, "4 ranks, 2 cores": 5, "4 ranks, 16 cores": 7}
    values = [
        file.row(run=run, schedule="nested", micro_batches=8, window_cache=False)["speedup"] for run in links.values()
    ]
    real = Panel(
        [Series("", list(values))],
        "speed-up over serial",
        title="nested, N = 8, links between CPU ranks",
        categories=list(links),
        decimals=2,
    )
    return Chart("Speed-up of pipeline schedules", [emulated, real], file.footer(0, 4, 5, 7))


def sparse_exposed() -> Chart:
    file = frame("sparse-parallelism")
    panels = []
    for number in (1, 4):
        series = []
        for schedule in ("serial", "nested", "priority", "semi_async"):
            rows = file.rows(run=0, schedule=schedule, micro_batches=number)
            rows = sorted(rows, key=lambda row: row["collision"])
            x = [100 * row["collision"] for row in rows]
            series.append(Series(schedule, [row["exposed_comm_ms"] for row in rows], x=x))
        title = "1 micro-batch" if number == 1 else f"{number} micro-batches"
        panels.append(Panel(series, "collision rate, %", "exposed communication, ms", title=title))
    return Chart("Exposed communication by collision rate, two CPU ranks, 700 Mbit/s", panels, file.footer(0))


def balance_imbalance() -> Chart:
    file = frame("balance")
    policies = ["fixed", "power", "token_threshold", "zigzag", "karmarkar_karp", "greedy", "refined"]
    panels = []
    for title, where in (
        ("16 ranks, 8 samples per rank", {"lengths": "turbogr-kuai", "ranks": 16, "cost": "tokens", "noise": "none"}),
        (
            "256 ranks, 128 samples, noise 10%",
            {"lengths": "freescale", "ranks": 256, "cost": "tokens", "noise": "uniform"},
        ),
    ):
        rows = {row["policy"]: row for row in file.rows(run=0, **where) if row.get("imbalance") is not None}
        values = [100 * rows[policy]["imbalance"] for policy in policies]
        panels.append(
            Panel([Series("", list(values))], "(max - mean) / max, %", title=title, categories=policies, decimals=2)
        )
    return Chart("Predicted imbalance of tokens over ranks", panels, file.footer(0, note="simulated lengths"))


def stores_bandwidth() -> Chart:
    panels = []
    footers = []
    for name, title in (("stores", "Two CPU cores"), ("stores-h200", "Host of an H200, 16 cores")):
        file = frame(name)
        rows = [row for row in file.rows(op=("gather", "scatter")) if row["store"] != "index_select"]
        rows = [*file.rows(op="gather", store="index_select"), *rows]
        panels.append(
            Panel(
                [Series("", [row["gb_per_s"] for row in rows])],
                "GB/s of rows (logarithmic)",
                title=title,
                categories=[f"{row['op']}, {row['store']}" for row in rows],
                colors=[int(row["store"] == "index_select") for row in rows],
                log_x=True,
                decimals=1,
            )
        )
        footers.append(file.footer())
    return Chart("Bandwidth of embedding stores", panels, "; ".join(footers))


def negatives_memory() -> Chart:
    file = frame("negatives")
    numbers = (32, 64, 128, 256)
    variants = ("plain", "fused", "segments", "offload")
    memory = []
    times = []
    for variant in variants:
        rows = [file.row(variant=variant, negatives=number) for number in numbers]
        memory.append(Series(variant, [row["negatives_gib"] for row in rows]))
        times.append(Series(variant, [row["step_ms"] for row in rows]))
    categories = [f"{number} negatives" for number in numbers]
    panels = [
        Panel(memory, "memory of negatives, GiB", categories=categories, decimals=1),
        Panel(times, "step, ms", categories=categories),
    ]
    return Chart("Memory and time of sampled softmax on one H200", panels, file.footer(0, 1))


def choices_quality() -> Chart:
    file = frame("choices")
    labels = {
        "ml_1m_ordered_hstu_bfloat16": "16-bit rows, MovieLens 1M",
        "ml_1m_ordered_hstu_local": "semi-local attention, MovieLens 1M",
        "beauty_hstu_fp8": "8-bit projections, Amazon Beauty",
        "ml_1m_ordered_hstu_large_fp8": "8-bit projections, MovieLens 1M",
    }
    rows = {row["recipe"]: row for row in file.rows("comparisons")}
    series = Series(
        "",
        [rows[name]["ndcg@10_difference"] for name in labels],
        [tuple(rows[name]["ndcg@10_difference_interval"]) for name in labels],
    )
    panel = Panel(
        [series],
        "difference of NDCG@10 (95% intervals)",
        categories=list(labels.values()),
        limit=(0.0, ""),
        decimals=4,
    )
    runs = {rows[name]["run"] for name in labels}
    return Chart("Effect of options on quality", [panel], file.footer(*sorted(runs), note="means over 3 seeds"))


def retrieval_latency() -> Chart:
    file = frame("retrieval")
    panels = []
    for items in (1_000_000, 10_000_000):
        rows = [row for row in file.rows(items=items, device="cuda", run=0) if not row.get("http")]
        series = [
            Series(label, [row[field] for row in rows])
            for field, label in (("device_ms", "device"), ("p50_ms", "P50"), ("p99_ms", "P99"))
        ]
        categories = [f"batch of {row['batch']}" for row in rows]
        panels.append(Panel(series, "ms per batch", title=f"{items:,} items", categories=categories, decimals=2))
    note = "100 items of each request, rows of 128 bfloat16, without the HTTP server"
    return Chart("Exact search on one H200", panels, file.footer(0, note=note))


def features_auc() -> Chart:
    file = frame("features")
    inputs = {
        "ids": "ids only",
        "features": "ids and features",
        "interactions": "with dot products (DLRM head)",
        "logistic": "logistic regression",
        "boosted trees": "gradient-boosted trees",
    }
    rows = [file.row(dataset="kuairand", part="all", metric="auc/click", inputs=name) for name in inputs]
    series = Series("", [row["value"] for row in rows], [(row["low"], row["high"]) for row in rows])
    panel = Panel(
        [series],
        "AUC of clicks (95% intervals)",
        categories=list(inputs.values()),
        colors=[0, 0, 0, 1, 1],
        decimals=3,
        start=0.5,
    )
    runs = {row["run"] for row in rows}
    return Chart("Ranking quality on KuaiRand by inputs", [panel], file.footer(*sorted(runs)))


def data_append() -> Chart:
    file = frame("fresh")
    rows = sorted(file.rows(what="append"), key=lambda row: (row["events"], row["onto_events"]))
    panel = Panel(
        [Series("", [row["wall_s"] for row in rows])],
        "seconds",
        categories=[f"{row['events']:,} events to {row['onto_events']:,}" for row in rows],
        decimals=1,
    )
    runs = sorted({row["run"] for row in rows})
    return Chart("Time to append events of twelve columns to a dataset", [panel], file.footer(*runs))


def fresh_quality() -> Chart:
    file = frame("fresh")
    series = []
    for way, label in (("anew", "retrained from scratch"), ("followed", "online training"), ("frozen", "frozen")):
        rows = file.rows(what="quality_of_window", recipe="kuairand_ranking", way=way)
        rows = sorted(rows, key=lambda row: row["window"])
        series.append(Series(label, [row["value"] for row in rows], x=[row["window"] + 1.0 for row in rows]))
    panel = Panel(series, "day", "AUC of clicks")
    runs = sorted({row["run"] for row in rows})
    footer = file.footer(*runs, note="KuaiRand-Pure; each day is predicted before it is trained on; means over 3 seeds")
    return Chart("Ranking quality by day of training", [panel], footer)


def fleets_faults() -> Chart:
    file = frame("operator")
    faults = {"kill": "killed", "pause": "paused", "full": "full"}
    rows = [file.row(shown=f"store under {name}") for name in faults]
    outcomes = {
        "answered": "served",
        "refused": "rejected with 503",
        "wrong": "wrong scores",
        "failed": "failed",
    }
    series = [Series(label, [row[field] for row in rows]) for field, label in outcomes.items()]
    panel = Panel(series, "requests", categories=list(faults.values()))
    runs = sorted({row["run"] for row in rows})
    return Chart("Requests while the history store fails, 20 times each", [panel], file.footer(*runs))


def security_cost() -> Chart:
    file = frame("safety")
    panels = []
    for what, title in (("request", "Complete request"), ("gate", "Check alone")):
        rows = file.rows(what=what)
        panels.append(
            Panel(
                [Series("", [row["median_us"] for row in rows])],
                "microseconds (median)",
                title=title,
                categories=[row["way"].replace("open", "no keys").replace("1 keys", "1 key") for row in rows],
                decimals=0 if what == "request" else 1,
            )
        )
    return Chart("Cost of authentication and TLS per request", panels, file.footer())


def checkpoints_stall() -> Chart:
    file = frame("checkpoint")
    rows = [row for row in file.rows(what="save", run=(0, 3, 4)) if row.get("stall_share") is not None]
    machines = {0: "host of an H200, 8 cores", 3: "2 cores", 4: "2 cores"}
    labels = [
        f"{row['rows_gib']:g} GiB, {row['ranks']} {'rank' if row['ranks'] == 1 else 'ranks'}, {machines[row['run']]}"
        for row in rows
    ]
    spread = [(100 * row["stall_share_spread"][0], 100 * row["stall_share_spread"][1]) for row in rows]
    panels = [
        Panel(
            [Series("", [100 * row["stall_share"] for row in rows], list(spread))],
            "training time, % (error bars: range)",
            categories=labels,
            decimals=1,
        ),
        Panel([Series("", [row["seconds"] for row in rows])], "seconds per save", categories=labels, decimals=1),
    ]
    return Chart("Cost of asynchronous checkpoints while they are written", panels, file.footer(0, 3, 4))


def scaling_options() -> Chart:
    hierarchy = frame("hierarchy")
    dense = frame("dense")
    rows = {
        "hierarchical all-to-all: bytes between hosts": hierarchy.row(schedule="nested", hierarchy=True)["bytes_ratio"],
        "hierarchical all-to-all: step": hierarchy.row(schedule="nested", hierarchy=True)["step_ratio"],
        "all-reduce inside the backward pass: step": dense.row(schedule="nested", overlap=True)["step_ratio"],
    }
    panel = Panel(
        [Series("", [100 * value for value in rows.values()])],
        "% of the same run without the option",
        categories=list(rows),
        limit=(100.0, ""),
    )
    footer = f"{hierarchy.footer()}; links of 100 and 400 Mbit/s between network namespaces, nested schedule"
    return Chart("Effect of scaling options over emulated slow links", [panel], footer)


def planning_error() -> Chart:
    panels = []
    footers = []
    titles = {
        "plan-validation": "2 and 4 CPU ranks, limited links",
        "plan-validation-h200": "One H200, emulated network",
    }
    for name, title in titles.items():
        file = frame(name)
        series = []
        for used_to_fit, label in ((False, "predicted"), (True, "used to fit")):
            rows = [row for row in file.content["rows"] if bool(row.get("used_to_fit")) == used_to_fit]
            if rows:
                x = [row["measured_ms"] for row in rows]
                series.append(Series(label, [row["predicted_ms"] for row in rows], x=x))
        panels.append(Panel(series, "measured step, ms", "predicted step, ms", title=title, is_scatter=True))
        footers.append(file.footer())
    return Chart("Predicted against measured step times", panels, "; ".join(footers))


CHARTS: dict[str, Callable[[], Chart]] = {
    "peers-throughput": peers_throughput,
    "kv-cache-p99": kv_cache_p99,
    "kv-cache-throughput": kv_cache_throughput,
    "kv-cache-emulated": kv_cache_emulated,
    "overload": overload,
    "attention-tflops": attention_tflops,
    "attention-biases": attention_biases,
    "step-mfu": step_mfu,
    "lookup-speed": lookup_speed,
    "quality-ndcg": quality_ndcg,
    "quality-auto": quality_auto,
    "nested-speedup": nested_speedup,
    "sparse-exposed": sparse_exposed,
    "balance-imbalance": balance_imbalance,
    "stores-bandwidth": stores_bandwidth,
    "negatives-memory": negatives_memory,
    "choices-quality": choices_quality,
    "retrieval-latency": retrieval_latency,
    "features-auc": features_auc,
    "data-append": data_append,
    "fresh-quality": fresh_quality,
    "fleets-faults": fleets_faults,
    "security-cost": security_cost,
    "checkpoints-stall": checkpoints_stall,
    "scaling-options": scaling_options,
    "planning-error": planning_error,
}


def main() -> None:
    """Draw the charts whose texts or values changed, and delete charts without a function."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, select in CHARTS.items():
        chart = select()
        for theme in INK:
            path = FOLDER / f"{name}-{theme}.svg"
            if (text := draw(chart, name, theme)) != (path.read_text() if path.exists() else ""):
                path.write_text(text)
                print(f"updated: {path.relative_to(DOCS.parent)}")
    for path in FOLDER.glob("*.svg"):
        if path.stem.rpartition("-")[0] not in CHARTS:
            path.unlink()


if __name__ == "__main__":
    main()
