"""`nestrec bench NAME`: one small command a benchmark. Each prints a table and, with `--json`, writes a result file.

Heavy imports stand inside the commands, so that help answers at once.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nestrec.base.overrides import PASSED_ON, parse_overrides

app = typer.Typer(
    help="Measure, and write result files that anyone can repeat. `nestrec options bench NAME` lists the fields that a "
    "benchmark takes as options.",
    no_args_is_help=True,
)


@app.callback()
def show_progress(context: typer.Context) -> None:
    """A bar for as long as a benchmark runs, on a terminal; its help and its result do not need one."""
    if "--help" not in sys.argv:
        from nestrec.report import progress_for

        context.with_resource(progress_for(f"bench {context.invoked_subcommand}"))


JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the rows into this result file.")]


@app.command()
def quality(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Tested runs, or a folder of them.")],
    pair: Annotated[list[str] | None, typer.Option(help="RECIPE:OTHER, compared user by user; repeatable.")] = None,
    json: JsonFile = None,
    page: Annotated[Path | None, typer.Option(help="Markdown page whose tables are written anew.")] = None,
) -> None:
    """Mean of seeds with intervals over users, baselines, and paired differences, from runs of `nestrec train`."""
    from nestrec.bench.harness.frame import save_frame
    from nestrec.bench.quality.quality import quality_frame, short_rows, write_page

    frame = quality_frame(runs, pair or [], command=_command())
    _show("quality, mean of seeds [95% interval over users]", short_rows(frame["rows"]))
    _show("paired differences", short_rows(frame["comparisons"], "_difference"))
    if json is not None:
        save_frame(json, frame)
    if page is not None:
        write_page(page, frame)


@app.command()
def evaluations(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Tested runs of any task.")],
    json: JsonFile = None,
) -> None:
    """What `nestrec train` measured on the test part of each run, model and baselines."""
    from nestrec.bench.quality.evaluations import by_recipe, evaluation_rows

    rows = evaluation_rows(runs)
    for recipe, shown in by_recipe(rows).items():
        _show(recipe, shown)
    _save("evaluations", rows, json)


@app.command()
def balance(
    *,
    lengths: Annotated[str | None, typer.Option(help="Preset, dataset or file; none: all published settings.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, where lengths are given.")] = 16,
    batch: Annotated[int, typer.Option(min=1, help="Samples a rank, where lengths are given.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Global batches to average over.")] = 50,
    seed: Annotated[int, typer.Option(help="Of lengths, order and noise.")] = 0,
    measured_rounds: Annotated[
        int, typer.Option(min=0, help="Global batches trained on by real ranks, of up to 4 ranks; 0 trains none.")
    ] = 30,
    json: JsonFile = None,
) -> None:
    """Every balance policy on the same global batches, beside what the papers print.

    Predicted by cost models; with up to 4 ranks also measured, by a small model that real ranks train.
    """
    from nestrec.bench.balance import balance as bench

    if lengths is None:
        rows = bench.run_settings(seed=seed, rounds=rounds, measured_rounds=measured_rounds)
    else:
        rows = bench.run_one(lengths, ranks, batch, seed, rounds, measured_rounds)
    bench.show(rows)
    _save("balance", rows, json)


@app.command()
def prepare(
    events: Annotated[
        list[int] | None, typer.Option(min=1, help="Events of the log; repeatable; 10000000 where not given.")
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Items of the log.")] = 50_000,
    json: JsonFile = None,
) -> None:
    """`nestrec prepare` on a synthetic log: events a second and peak memory of a fresh process."""
    from nestrec.bench.quality.prepare import measure_prepare

    _finish("prepare", measure_prepare(events or [10_000_000], num_items=items), json)


@app.command(context_settings=PASSED_ON)
def stores(context: typer.Context, json: JsonFile = None) -> None:
    """Gather and scatter of rows in each store, beside index_select.

    The fields of StoresBench are options: [bold]--num_rows 100000 --num_keys 10000 --disk_rows 10000[/bold].
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.kernels.stores import StoresBench, measure_stores

    bench = with_overrides(StoresBench(), parse_overrides(context.args, ("json",)))
    _finish("stores", measure_stores(bench), json)


@app.command(context_settings=PASSED_ON)
def lookup(context: typer.Context, json: JsonFile = None) -> None:
    """Rows of a table in device memory: gather, update, and deduplicate + sum + update, beside plain torch and a copy.

    The fields of LookupBench are options: [bold]--num_rows 1000000 --num_keys 65536 --zipf 1.05 --device cpu[/bold].
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.kernels.lookup import LookupBench, measure_lookup, short_rows

    bench = with_overrides(LookupBench(), parse_overrides(context.args, ("json",)))
    rows = []
    for row in measure_lookup(bench):
        rows.append(row)
        _save("lookup", rows, json)
    _show("lookup", short_rows(rows))


@app.command(context_settings=PASSED_ON)
def layer(context: typer.Context, json: JsonFile = None) -> None:
    """One HSTU layer, forward and backward: fused, with recomputation, and in plain torch.

    The fields of LayerBench are options: [bold]--lengths u4096,logn --heads 4x256,8x128[/bold].
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.harness.flops import FORMULA
    from nestrec.bench.kernels.layer import LayerBench, measure_layers

    bench = with_overrides(LayerBench(), parse_overrides(context.args, ("json",)))
    rows = []
    for row in measure_layers(bench):
        rows.append(row)
        _save("layer", rows, json)
    typer.echo(FORMULA)
    _show("one HSTU layer, forward and backward", rows)


@app.command(context_settings=PASSED_ON)
def step(context: typer.Context, json: JsonFile = None) -> None:
    """Whole training steps: lookup, model, sampled loss, optimisers. MFU, tokens a second, memory, time by part.

    The fields of StepBench are options: [bold]--cases hstu-4x256-u4096 --num_negatives 32 --recompute true[/bold].
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.harness.flops import FORMULA
    from nestrec.bench.step.step import StepBench, measure_steps, memory_rows, short_rows

    bench = with_overrides(StepBench(), parse_overrides(context.args, ("json",)))
    rows = []
    for row in measure_steps(bench):
        rows.append(row)
        _save("step", rows, json)
        if "step_ms" in row:
            typer.echo(f"{row['model']}: {row['step_ms']} ms, MFU {row['mfu']:.1%}. {row.get('parts', '')}")
    typer.echo(FORMULA)
    _show("training step", short_rows(rows))
    _show("memory of forward and backward", memory_rows(rows))


@app.command()
def peers(
    *,
    dense: Annotated[list[str] | None, typer.Option(help="mlp or bucket; repeatable; both where not given.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each system.")] = 15,
    steps: Annotated[int, typer.Option(min=0, help="Steps of a round; 0: 4 for mlp, 1 for bucket.")] = 0,
    python: Annotated[Path | None, typer.Option(help="Python that has TorchRec, if not .venv-torchrec's.")] = None,
    json: JsonFile = None,
    page: Annotated[Path | None, typer.Option(help="Markdown page whose tables are written anew.")] = None,
) -> None:
    """The same training job through nestrec and TorchRec, by turns in the same two processes."""
    from nestrec.bench.harness.frame import make_frame, save_frame
    from nestrec.bench.peers.peers import HOW_TO_COMPARE, PeersBench, find_python, measure_peers, short_rows, write_page

    if (found := find_python(python)) is None:
        typer.echo(HOW_TO_COMPARE)
    rows = []
    for kind in dense or ["mlp", "bucket"]:
        rows += measure_peers(PeersBench(dense=kind, rounds=rounds, steps=steps), found)
    _show("peers [quartiles of rounds]; ratio: nestrec over the row", short_rows(rows))
    frame = make_frame(bench="peers", command=_command(), rows=rows)
    if json is not None:
        save_frame(json, frame)
    if page is not None:
        write_page(page, frame)


@app.command(context_settings=PASSED_ON)
def schedules(context: typer.Context, json: JsonFile = None) -> None:
    """Every schedule on the same batches, over limited links between real ranks (real as root, else emulated).

    The fields of SchedulesBench are options: [bold]--ranks 2 --micro_batches 4,8 --link_mbit 500 --job.dim 64[/bold].
    Without link_mbit the links are chosen so that communication takes comm_share of the computation.
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.schedules.schedules import SchedulesBench, is_emulated, measure_schedules, short_rows

    bench = with_overrides(SchedulesBench(), parse_overrides(context.args, ("json",)))
    rows = measure_schedules(bench)
    _show(f"schedules over {'EMULATED' if is_emulated(bench) else 'real'} links, medians", short_rows(rows))
    _save("schedules", rows, json, emulated=is_emulated(bench))


@app.command(context_settings=PASSED_ON)
def sparse(context: typer.Context, json: JsonFile = None) -> None:
    """Rows shared by consecutive batches and by replica groups: exposed communication, All2All, sync and memory.

    The fields of SparseBench are options: [bold]--collisions 0,0.12,0.6 --replicas 1,2,4 --job.dim 64[/bold].
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.harness.limited_links import can_limit
    from nestrec.bench.schedules.sparse import SparseBench, measure_sparse, short_rows

    bench = with_overrides(SparseBench(), parse_overrides(context.args, ("json",)))
    emulated, rows = bench.emulated or not can_limit(), []
    for row in measure_sparse(bench):
        rows.append(row)
        _save("sparse", rows, json, emulated=emulated)  # each as it comes: a run that is cut keeps what it has
    for experiment in ("collisions", "replicas", "memory"):
        _show(f"{experiment} over {'EMULATED' if emulated else 'real'} links", short_rows(rows, experiment))


@app.command(context_settings=PASSED_ON)
def exchange(context: typer.Context, json: JsonFile = None) -> None:
    """Bandwidth and latency of each transport between processes, and what a matmul beside it loses (on a GPU).

    The fields of ExchangeBench are options: [bold]--ranks 2,4 --transports host,copy_engine --bytes 1048576[/bold].
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.kernels.exchange import ExchangeBench, measure_exchange

    bench = with_overrides(ExchangeBench(), parse_overrides(context.args, ("json",)))
    rows = measure_exchange(bench)
    _finish("exchange", rows, json if rows else None)


@app.command(context_settings=PASSED_ON)
def relay(
    context: typer.Context,
    json: JsonFile = None,
    page: Annotated[Path | None, typer.Option(help="HTML page with P99 over load and the tables.")] = None,
) -> None:
    """Largest rate that meets a P99: full inference, prefixes from DRAM, relay on the device, relay with DRAM.

    The fields of RelayBench are options: [bold]--history 512 --candidates 64 --returning 0,0.3 --duration_s 8[/bold].
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.serving.relay import measure_relay
    from nestrec.bench.serving.relay_bed import RelayBench
    from nestrec.bench.serving.relay_tables import short_rows, summary

    bench = with_overrides(RelayBench(), parse_overrides(context.args, ("json", "page")))
    rows: list[dict[str, Any]] = []
    for row in measure_relay(bench):
        rows.append(row)
        typer.echo(summary(row), err=True)
        _save("relay", rows, json, emulated=any(row.get("emulated", False) for row in rows))
    for title, shown in short_rows(rows).items():
        _show(f"relay: {title}", shown)
    if page is not None:
        from nestrec.bench.harness.frame import make_frame
        from nestrec.bench.serving.relay_page import write_page

        write_page(page, make_frame(bench="relay", command=_command(), rows=rows))


@app.command()
def clustering(
    data: Annotated[
        list[str] | None, typer.Argument(help="Presets or prepared datasets; turbogr-kuai where not given.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a rank in a step.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Batches to average over.")] = 5,
    json: JsonFile = None,
) -> None:
    """Rows that cross the network for each clustering into micro-batches, with and without the window cache."""
    from nestrec.bench.balance.clustering import measure_clustering, short_rows

    rows = [row for name in data or ["turbogr-kuai"] for row in measure_clustering(name, batch=batch, rounds=rounds)]
    _show("vectors sent over unique keys of the batch (with the window cache: cached)", short_rows(rows))
    _save("clustering", rows, json)


@app.command(context_settings=PASSED_ON)
def overload(context: typer.Context, json: JsonFile = None) -> None:
    """A server under 2, 5 and 10 times its capacity: goodput, latency of the accepted, time to refuse, memory.

    The fields of OverloadBench are options: [bold]--duration_s 30 --multiples 2,5,10[/bold].
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.serving.overload import OverloadBench, measure_overload

    bench = with_overrides(OverloadBench(), parse_overrides(context.args, ("json",)))
    _finish("overload", measure_overload(bench), json)


@app.command(context_settings=PASSED_ON)
def front(context: typer.Context, json: JsonFile = None) -> None:
    """What HTTP costs: ranking requests on a model that computes next to nothing.

    The fields of FrontBench are options: [bold]--rate 500 --candidates 256 --duration_s 20[/bold].
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.serving.front import FrontBench, measure_front

    bench = with_overrides(FrontBench(), parse_overrides(context.args, ("json",)))
    _finish("front", measure_front(bench), json)


@app.command(context_settings=PASSED_ON)
def calibrate(context: typer.Context, json: JsonFile = None) -> None:
    """What the operations of a step take on this machine: a profile for `nestrec plan --profile`.

    The fields of CalibrateBench are options: [bold]--samples 64,192 --lengths 16,64 --job.dim 64[/bold].
    """
    from nestrec.base.config import to_plain, with_overrides
    from nestrec.bench.harness.frame import make_frame, save_frame
    from nestrec.bench.planning.calibrate import CalibrateBench
    from nestrec.bench.planning.calibrate import calibrate as measure

    rows, profile = measure(with_overrides(CalibrateBench(), parse_overrides(context.args, ("json",))))
    _show("calibrate: time = fixed + unit x amount", rows)
    if json is not None:
        save_frame(json, {**make_frame(bench="calibrate", command=_command(), rows=rows), "profile": to_plain(profile)})


@app.command()
def papers(
    paper: Annotated[str, typer.Argument(help="nestpipe, 2d, freescale or turbogr.")], json: JsonFile = None
) -> None:
    """What papers print about many devices beside what the simulator says, and what had to be assumed."""
    from nestrec.base.errors import UserError, did_you_mean
    from nestrec.bench.harness.frame import make_frame, save_frame
    from nestrec.planning.papers import PAPERS

    if paper not in PAPERS:
        raise UserError("is no known paper", field="PAPER", value=paper, remedy=did_you_mean(paper, PAPERS))
    found = PAPERS[paper]()
    rows = [row.row() for row in found.rows]
    _show(f"{paper}: published and predicted", [{k: v for k, v in row.items() if v is not None} for row in rows])
    for assumption in found.assumptions:
        typer.echo(f"assumed: {assumption}")
    if json is not None:
        frame = make_frame(bench="papers", command=_command(), rows=rows)
        save_frame(json, {**frame, "assumptions": list(found.assumptions)})


@app.command(context_settings=PASSED_ON)
def prediction(
    context: typer.Context,
    measured: Annotated[
        Path | None, typer.Option(help="File of measurements: kept, and beds in it not repeated.")
    ] = None,
    rows_of: Annotated[
        list[Path] | None, typer.Option(help="Predict result files of `bench schedules` instead; repeatable.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Simulated steps beside measured ones on 2 and 4 ranks: fitted to a third of the configurations, tested on others.

    The fields of PredictionBench are options: [bold]--ranks 2 --link_mbit 300,900 --rounds 5[/bold].
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.harness.frame import make_frame, save_frame
    from nestrec.bench.planning.prediction import PredictionBench, measure_beds, predict, short_rows

    if rows_of:
        _predict_rows(rows_of, json)
        return
    bench = with_overrides(PredictionBench(), parse_overrides(context.args, ("json", "measured", "rows-of")))
    rows, summary = predict(bench, measure_beds(bench, measured))
    _show("prediction: milliseconds of a step", short_rows(rows))
    _show("errors of the tested", [{k: v for k, v in summary.items() if not isinstance(v, dict)}])
    if json is not None:
        emulated = bench.options().emulated
        frame = make_frame(bench="prediction", command=_command(), rows=rows, emulated=emulated)
        save_frame(json, {**frame, "summary": summary})


def _predict_rows(sources: Sequence[Path], json: Path | None) -> None:
    """The overlapping schedules of result files of one machine out of their serial rows."""
    from nestrec.bench.harness.frame import load_frame, make_frame, save_frame
    from nestrec.bench.planning.prediction_rows import predict_rows

    frames = [load_frame(source) for source in sources]
    rows, summary = predict_rows([row for frame in frames for row in frame["rows"]])
    _show("prediction: milliseconds of a step", rows)
    _show("errors", [summary])
    if json is not None:
        made = make_frame(bench="prediction", command=_command(), rows=rows, measured_on=frames[0]["hardware"],
                          emulated=any(frame["emulated"] for frame in frames))  # fmt: skip
        save_frame(json, {**made, "summary": summary, "measured_by": [frame["command"] for frame in frames]})


@app.command(context_settings=PASSED_ON)
def simulator(context: typer.Context, json: JsonFile = None) -> None:
    """How long simulating many ranks and steps takes, and how much memory.

    The fields of SimulatorBench are options: [bold]--ranks 4096 --steps 100 --schedules nested[/bold].
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.planning.simulator import SimulatorBench, measure_simulator

    bench = with_overrides(SimulatorBench(), parse_overrides(context.args, ("json",)))
    _finish("simulator", measure_simulator(bench), json)


@app.command(context_settings=PASSED_ON)
def attention(context: typer.Context, json: JsonFile = None) -> None:
    """HSTU attention on this GPU against what torch offers, with the ceilings of a matrix product and a copy.

    The fields of AttentionBench are options: [bold]--shapes u4096,logn --heads 4x128 --impls nestrec[/bold].
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.kernels.attention import AttentionBench, measure_attention

    bench = with_overrides(AttentionBench(), parse_overrides(context.args, ("json",)))
    _show("attention", measure_attention(bench, lambda rows: _save("attention", rows, json)))


@app.command(context_settings=PASSED_ON)
def negatives(context: typer.Context, json: JsonFile = None) -> None:
    """Memory and time of training steps, by the number of negatives and how their vectors are kept.

    The fields of NegativesBench are options: [bold]--negatives 32,128 --variants plain,fused --precision bf16[/bold].
    With [bold]--ranks 4[/bold] only the bytes are counted that so many ranks of this machine's CPU move.
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.step.negatives import NegativesBench, measure_negatives

    bench = with_overrides(NegativesBench(), parse_overrides(context.args, ("json",)))
    rows = []
    for row in measure_negatives(bench):
        rows.append(row)
        _save("negatives", rows, json)  # each row as soon as it is there: the next may not fit the device
        figures = [f"{name} {row[name]}" for name in ("peak_gib", "step_ms", "looked_up_bytes") if name in row]
        typer.echo(f"{row['variant']} {row['negatives']}: {', '.join(figures)}", err=True)
    _finish("negatives", rows, json)


@app.command()
def join(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Result files.")],
    json: Annotated[Path, typer.Option("--json", help="The file that holds all of them.")],
    bench: Annotated[str, typer.Option(help="What the joined file calls itself.")] = "schedules",
) -> None:
    """Put result files of several commands into one."""
    from nestrec.bench.harness.frame import join_frames, load_frame, save_frame

    save_frame(json, join_frames([load_frame(file) for file in files], bench=bench, command=_command()))


def _finish(bench: str, rows: Sequence[Mapping[str, Any]], json: Path | None, *, emulated: bool = False) -> None:
    """Print the rows as a table and, where asked, write them."""
    _show(bench, rows)
    _save(bench, rows, json, emulated=emulated)


def _show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from nestrec.report import print_rows

    if rows:
        print_rows(rows, title=title)


def _save(bench: str, rows: Sequence[Mapping[str, Any]], json: Path | None, *, emulated: bool = False) -> None:
    from nestrec.bench.harness.frame import write_frame

    if json is not None:
        write_frame(json, bench=bench, command=_command(), rows=rows, emulated=emulated)


def _command() -> str:
    """What was typed."""
    return shlex.join(["nestrec", *sys.argv[1:]])
