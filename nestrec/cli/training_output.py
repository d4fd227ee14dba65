"""Runs training, evaluation and batch inference for the command line, and prints results.

`nestrec recommend` and `nestrec embed`: files for very many users.

What the commands show on a terminal while they train and measure.
"""

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console

from nestrec.api import topology_of
from nestrec.base import errors
from nestrec.base.config_overrides import parse_overrides, with_overrides
from nestrec.base.cuda import chosen_device
from nestrec.base.errors import UserError, did_you_mean
from nestrec.data.samples.split import Part
from nestrec.distributed import Topology
from nestrec.distributed.topology import ParallelConfig
from nestrec.exporters.version_publisher import open_publishing
from nestrec.inference.batch_inference import BatchJobConfig, BatchRecommender
from nestrec.inference.recommender import load
from nestrec.report import LiveProgress, evaluation_table, progress_for
from nestrec.report.console_tables import print_rows
from nestrec.report.formatting import OF_SLICES, duration, slice_rows, verdict_on
from nestrec.report.run_records import best_evaluation, load_run
from nestrec.serving.model.serving_spec import why_not_served
from nestrec.tasks.task import Evaluation
from nestrec.training.callbacks import CallbackList, TrainingCallback
from nestrec.training.recipes.auto_recipe import NAME as AUTO
from nestrec.training.run_checkpointer import RunInterruptedError
from nestrec.training.run_config import RunConfig
from nestrec.training.run_folder import RunFolder
from nestrec.training.state import TrainState
from nestrec.training.stream_trainer import StreamTrainer, stream_config
from nestrec.training.trainer import Trainer

_NAMES = ("output", "users", "data", "device", "what")


def recommend_users(
    model: str, users: str, output: Path, *, data: Path | None, device: str, words: Sequence[str]
) -> None:
    batch, topology = _batch(model, device, words)
    start_s = time.perf_counter()
    count = batch.recommend(users, output, data=data)
    _say(topology, count, "users", output, start_s, num_without=batch.num_without)


def embed_all(
    model: str, what: str, users: str, output: Path, *, data: Path | None, device: str, words: Sequence[str]
) -> None:
    if what not in ("users", "items"):
        raise UserError("has no vectors", option="--what", value=what, remedy=did_you_mean(what, ("users", "items")))
    batch, topology = _batch(model, device, words)
    start_s = time.perf_counter()
    if what == "items":
        count = batch.embed_items(output)
    else:
        count = batch.embed_users(users, output, data=data)
    _say(topology, count, what, output, start_s, num_without=batch.num_without)


def _batch(model: str, device: str, words: Sequence[str]) -> tuple[BatchRecommender, Topology]:
    cfg = with_overrides(BatchJobConfig(), parse_overrides(words, _NAMES))
    topology = Topology.from_environment(chosen_device(device))
    return load(model, device=str(topology.device)).batch(cfg, topology), topology


def _say(topology: Topology, count: int, what: str, output: Path, start_s: float, *, num_without: int) -> None:
    if topology.is_first:
        seconds = time.perf_counter() - start_s
        typer.echo(f"{output}: {count:,} {what} in {seconds:.1f} s ({count / max(seconds, 1e-9):,.0f} a second)")
        if num_without:
            typer.echo(f"{num_without:,} of them got nothing: the model knows no event of theirs", err=True)


def train_run(cfg: RunConfig, folder: Path, start_from: Path | None = None) -> None:
    """Train, measure the best epoch on the test part, and print it beside its baselines."""
    topology = topology_of(cfg, cfg.ranks)
    if topology.is_first:
        for option, why in cfg.reasons.items():
            print(f"chose {option} = {why}")
    with contextlib.ExitStack() as shown:
        listeners: list[TrainingCallback] = []
        if topology.is_first:
            from nestrec.report.tensorboard_log import TensorBoardWriter

            listeners.append(shown.enter_context(LiveProgress(num_epochs=cfg.training.epochs)))
            listeners.append(shown.enter_context(TensorBoardWriter(folder / "tensorboard")))
        trainer = Trainer(
            cfg,
            folder,
            topology,
            CallbackList(listeners),
            start_from=start_from,
            open_publishing=open_publishing,
        )
        began_s = time.perf_counter()
        try:
            trainer.train()
        except RunInterruptedError:
            print(f"stopped at step {trainer.state.step}; the same command goes on from there", file=sys.stderr)
            sys.exit(errors.INTERRUPTED)
    trained_s = time.perf_counter() - began_s
    last_step = trainer.state.step
    if topology.is_first:
        _warn_of_baselines(folder, cfg, trainer.state)
    with contextlib.closing(trainer):
        evaluation = trainer.evaluate("test") if trainer.ends_with_test else None
    if not topology.is_first:
        return
    if evaluation is not None:
        _show(evaluation, _title(trainer, "test"))
    elif cfg.training.train_only:
        print(f"trained only; to measure the run: nestrec eval {folder}")
    else:
        print("nothing is held out to test on")
    took = f"{trained_s:.1f} s" if trained_s < 60 else duration(trained_s)
    print(f"trained to step {last_step:,} in {took}; run folder: {folder}")
    print(f"next: {_next_commands(cfg, folder)}")


def _next_commands(cfg: RunConfig, folder: Path) -> str:
    """Returns what to type after a run: its report, and its export if models of its task can be served."""
    commands = [["nestrec", "report", str(folder)]]
    if why_not_served(cfg.task) is None:
        commands.append(["nestrec", "export", str(folder), str(Path("models", folder.resolve().name))])
    return "; ".join(map(shlex.join, commands))


def _warn_of_baselines(folder: Path, cfg: RunConfig, state: TrainState) -> None:
    """Prints a warning and advice if the best validation of a run is not better than a system without a model."""
    best = best_evaluation(load_run(folder))
    if best is None or (verdict := verdict_on(best["metrics"], best["headline"])) is None or verdict.outcome == "wins":
        return
    print(f"on validation: {verdict.sentence}", file=sys.stderr)
    if verdict.outcome == "loses":
        for line in _advice(folder, cfg, state):
            print(line, file=sys.stderr)


def _advice(folder: Path, cfg: RunConfig, state: TrainState) -> Iterator[str]:
    """What a user can try for a run that is worse than a baseline."""
    if state.best_step == state.step and state.evaluations_since_best == 0:
        epochs = cfg.training.epochs
        longer = f"--training.epochs {2 * epochs}"
        if cfg.training.max_steps is not None:
            longer += f" --training.max_steps {2 * cfg.training.max_steps}"
        yield f"try: the last epoch was the best one, so train longer: the same command with {longer}"
    run = shlex.quote(str(folder))
    data = shlex.quote(cfg.data.folder)
    search = f"nestrec tune {run}/config.json --output {run}-tune --runs 20"
    yield f"try: search other rates, dropouts and layers (pip install 'nestrec[tune]'): {search}"
    if cfg.name != AUTO and cfg.data.synthetic is None:
        automatic = f"nestrec train auto --data.folder {data} --output {run}-auto"
        yield f"try: sizes and loss chosen for this dataset: {automatic}"


def follow_run(source: str, folder: Path, overrides: dict[str, str]) -> None:
    """Train on what a source brings until it ends or a signal comes. overrides: `run.` begins those of the run."""
    of_run = {name.removeprefix("run."): text for name, text in overrides.items() if name.startswith("run.")}
    of_stream = {name: text for name, text in overrides.items() if not name.startswith("run.")}
    cfg = with_overrides(RunFolder(folder).config(), of_run)
    options = stream_config(Path(cfg.data.folder), of_stream)
    topology = topology_of(cfg, cfg.ranks)
    with contextlib.ExitStack() as shown:
        listeners: list[TrainingCallback] = []
        if topology.is_first:
            from nestrec.report.tensorboard_log import TensorBoardWriter

            listeners.append(shown.enter_context(LiveProgress()))
            listeners.append(shown.enter_context(TensorBoardWriter(folder / "tensorboard")))
        follower = StreamTrainer(
            source,
            folder,
            topology,
            options,
            cfg=cfg,
            listener=CallbackList(listeners),
            open_publishing=open_publishing,
        )
        try:
            follower.follow()
        except RunInterruptedError:
            state = follower.trainer.state
            print(f"stopped at step {state.step}; the same command goes on from there", file=sys.stderr)
            if follower.untrained:
                print(follower.untrained, file=sys.stderr)
            sys.exit(errors.INTERRUPTED)
    if topology.is_first:
        state = follower.trainer.state
        print(f"{state.windows_done} windows, step {state.step}, generation {state.generation}; run folder: {folder}")
        if follower.untrained:
            print(follower.untrained)


def evaluate_run(folder: Path, part: Part, *, best: bool) -> None:
    """Measure a run and print it; the result of its best weights is also written into its folder, as by `train`."""
    run_folder = RunFolder(folder)
    cfg = run_folder.config()
    topology = topology_of(cfg, ParallelConfig())  # to read tables, one group of any number of ranks will do
    with contextlib.ExitStack() as held:
        held.enter_context(progress_for(f"measure {folder}"))
        with run_folder.naming_config():
            trainer = held.enter_context(contextlib.closing(Trainer(cfg, folder, topology)))
        evaluation = trainer.evaluate(part) if best else trainer.measure(part, best=False)
    if topology.is_first:
        _show(evaluation, _title(trainer, part))


def _title(trainer: Trainer, part: Part) -> str:
    """Returns the title of a table of what a trainer has measured, with the weights that were used."""
    name = f"{trainer.folder.path.resolve().name} (recipe {trainer.cfg.name})"
    weights = "best validation epoch" if trainer.has_best else "last weights"
    return f"{name}: {part} part, {weights} (step {trainer.state.step}), 95% intervals"


def _show(evaluation: Evaluation, title: str) -> None:
    plain = evaluation.to_plain()
    Console().print(evaluation_table(plain, title=title))
    if rows := slice_rows(plain):
        print_rows(rows, title=OF_SLICES)
    if (verdict := verdict_on(plain["metrics"], plain["headline"])) is not None:
        print(verdict.sentence)
    for note in evaluation.notes:
        print(f"note: {note}")
