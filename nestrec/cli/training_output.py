"""Runs training, online training, evaluation and batch inference for the command line, and prints the results."""

import contextlib
import importlib.util
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console

from nestrec.api import create_topology
from nestrec.base import errors
from nestrec.base.config_overrides import apply_overrides, parse_overrides
from nestrec.base.cuda import resolve_device
from nestrec.base.errors import UserError, did_you_mean
from nestrec.base.lazy import install_extra
from nestrec.data.samples.split import Part
from nestrec.distributed import Topology
from nestrec.distributed.topology import ParallelConfig
from nestrec.exporters.version_publisher import open_publishing
from nestrec.inference.batch_inference import BatchJobConfig, BatchRecommender
from nestrec.inference.recommender import load
from nestrec.report import LiveProgress, evaluation_table, progress_for
from nestrec.report.console_tables import print_rows
from nestrec.report.formatting import SLICES_TITLE, duration, slice_rows, verdict_on
from nestrec.report.run_records import best_evaluation, load_run
from nestrec.serving.model.serving_spec import unsupported_reason
from nestrec.tasks.task import Evaluation
from nestrec.training.callbacks import CallbackList, TrainingCallback
from nestrec.training.recipes.auto_recipe import NAME as AUTO
from nestrec.training.run_checkpointer import RunInterruptedError
from nestrec.training.run_config import RunConfig
from nestrec.training.run_folder import RunFolder
from nestrec.training.state import TrainState
from nestrec.training.stream_trainer import StreamTrainer, stream_config
from nestrec.training.trainer import Trainer

_NAMES = ("output", "users", "data", "device", "entity")


def recommend_users(
    model: str, users: str, output: Path, *, data: Path | None, device: str, words: Sequence[str]
) -> None:
    batch, topology = _batch(model, device, words)
    start_s = time.perf_counter()
    count = batch.recommend(users, output, data=data)
    _print_count(topology, count, "users", output, start_s, num_unknown_users=batch.num_unknown_users)


def embed_all(
    model: str, entity: str, users: str, output: Path, *, data: Path | None, device: str, words: Sequence[str]
) -> None:
    if entity not in ("users", "items"):
        raise UserError(
            "no such entity", option="--entity", value=entity, remedy=did_you_mean(entity, ("users", "items"))
        )
    batch, topology = _batch(model, device, words)
    start_s = time.perf_counter()
    if entity == "items":
        count = batch.embed_items(output)
    else:
        count = batch.embed_users(users, output, data=data)
    _print_count(topology, count, entity, output, start_s, num_unknown_users=batch.num_unknown_users)


def _batch(model: str, device: str, words: Sequence[str]) -> tuple[BatchRecommender, Topology]:
    cfg = apply_overrides(BatchJobConfig(), parse_overrides(words, _NAMES))
    topology = Topology.from_environment(resolve_device(device))
    return load(model, device=str(topology.device)).batch(cfg, topology), topology


def _print_count(
    topology: Topology, count: int, entity: str, output: Path, start_s: float, *, num_unknown_users: int
) -> None:
    if topology.is_first:
        seconds = time.perf_counter() - start_s
        typer.echo(f"{output}: {count:,} {entity} in {seconds:.1f} s ({count / max(seconds, 1e-9):,.0f} per second)")
        if num_unknown_users:
            typer.echo(f"{num_unknown_users:,} of them have no result: the model knows none of their events", err=True)


def train_run(cfg: RunConfig, folder: Path, warm_start: Path | None = None) -> None:
    """Train a run, evaluate its best weights on the test split, and print the metrics of the model and baselines."""
    topology = create_topology(cfg, cfg.parallel)
    if topology.is_first:
        for option, why in cfg.reasons.items():
            print(f"chose {option} = {why}")
    with contextlib.ExitStack() as stack:
        callbacks: list[TrainingCallback] = []
        if topology.is_first:
            from nestrec.report.tensorboard_log import TensorBoardWriter

            callbacks.append(stack.enter_context(LiveProgress(num_epochs=cfg.training.epochs)))
            callbacks.append(stack.enter_context(TensorBoardWriter(folder / "tensorboard")))
        trainer = Trainer(
            cfg,
            folder,
            topology,
            CallbackList(callbacks),
            warm_start=warm_start,
            open_publisher=open_publishing,
        )
        start_s = time.perf_counter()
        try:
            trainer.train()
        except RunInterruptedError:
            print(f"interrupted at step {trainer.state.step}; the same command resumes the run", file=sys.stderr)
            sys.exit(errors.INTERRUPTED)
    trained_s = time.perf_counter() - start_s
    last_step = trainer.state.step
    if topology.is_first:
        is_improving = _warn_if_still_improving(folder, cfg, trainer.state)
        _warn_if_below_baseline(folder, cfg, trainer.state, suggests_longer=not is_improving)
    with contextlib.closing(trainer):
        evaluation = trainer.evaluate("test") if trainer.ends_with_test else None
    if not topology.is_first:
        return
    if evaluation is not None:
        _show(evaluation, _title(trainer, "test"))
    elif cfg.training.train_only:
        print(f"not evaluated (training.train_only); to evaluate the run: nestrec eval {folder}")
    else:
        print("not evaluated: the dataset does not have a test split")
    elapsed = f"{trained_s:.1f} s" if trained_s < 60 else duration(trained_s)
    print(f"trained to step {last_step:,} in {elapsed}; run folder: {folder}")
    print(f"next: {_next_commands(cfg, folder)}")


def _next_commands(cfg: RunConfig, folder: Path) -> str:
    """Return the commands to run next: the report, and the export if models of this task can be served."""
    commands = [["nestrec", "report", str(folder)]]
    if unsupported_reason(cfg.task) is None:
        commands.append(["nestrec", "export", str(folder), str(Path("models", folder.resolve().name))])
    return "; ".join(map(shlex.join, commands))


def _warn_if_still_improving(folder: Path, cfg: RunConfig, state: TrainState) -> bool:
    """Print a warning if the last of several validations was the best one and a limit of the run ended training.

    Returns:
        Whether the warning was printed.
    """
    reached = state.reached_limits(cfg.training)
    limit = next((name for name in ("max_steps", "epochs") if name in reached), None)
    if limit is None or not _is_last_validation_best(state) or len(load_run(folder).part("valid")) < 2:
        return False
    ending = f"training ended at {limit}={getattr(cfg.training, limit)}"
    print(f"the metric was still improving when {ending}: train longer, {_longer_command(cfg)}", file=sys.stderr)
    return True


def _longer_command(cfg: RunConfig) -> str:
    longer = f"the same command with --training.epochs {2 * cfg.training.epochs}"
    if cfg.training.max_steps is not None:
        longer += f" --training.max_steps {2 * cfg.training.max_steps}"
    return longer


def _is_last_validation_best(state: TrainState) -> bool:
    has_score = state.best_score is not None and not math.isnan(state.best_score)
    return has_score and state.evaluations_since_best == 0


def _warn_if_below_baseline(folder: Path, cfg: RunConfig, state: TrainState, *, suggests_longer: bool) -> None:
    """Print a warning and suggestions if the best validation result of a run does not exceed all baselines."""
    best = best_evaluation(load_run(folder))
    if best is None or (verdict := verdict_on(best["metrics"], best["headline"])) is None or verdict.outcome == "wins":
        return
    print(f"on validation: {verdict.sentence}", file=sys.stderr)
    if verdict.outcome == "loses":
        for line in _suggestions(folder, cfg, suggests_longer=suggests_longer and _is_last_validation_best(state)):
            print(line, file=sys.stderr)


def _suggestions(folder: Path, cfg: RunConfig, *, suggests_longer: bool) -> Iterator[str]:
    """Yield suggestions for a run that is worse than a baseline."""
    if suggests_longer:
        yield f"try: train longer, because the last validation was the best one: {_longer_command(cfg)}"
    run = shlex.quote(str(folder))
    data = shlex.quote(cfg.data.folder)
    search = f"nestrec tune {run}/config.json --output {run}-tune --num-trials 20"
    install = "" if importlib.util.find_spec("optuna") else f" ({install_extra('tune')})"
    yield f"try: search the learning rate, dropout and layers{install}: {search}"
    if cfg.name != AUTO and cfg.data.synthetic is None:
        automatic = f"nestrec train auto --data.folder {data} --output {run}-auto"
        yield f"try: choose sizes and loss for this dataset: {automatic}"


def follow_run(source: str, folder: Path, overrides: dict[str, str]) -> None:
    """Train a run on a stream until the source ends or a signal arrives.

    Args:
        source: Folder, or `kafka://BROKERS/TOPIC`.
        folder: Run folder.
        overrides: Dotted options of the stream; options of the run have the prefix `run.`.
    """
    run_overrides = {name.removeprefix("run."): text for name, text in overrides.items() if name.startswith("run.")}
    stream_overrides = {name: text for name, text in overrides.items() if not name.startswith("run.")}
    cfg = apply_overrides(RunFolder(folder).config(), run_overrides)
    options = stream_config(Path(cfg.data.folder), stream_overrides)
    topology = create_topology(cfg, cfg.parallel)
    with contextlib.ExitStack() as stack:
        callbacks: list[TrainingCallback] = []
        if topology.is_first:
            from nestrec.report.tensorboard_log import TensorBoardWriter

            callbacks.append(stack.enter_context(LiveProgress()))
            callbacks.append(stack.enter_context(TensorBoardWriter(folder / "tensorboard")))
        follower = StreamTrainer(
            source,
            folder,
            topology,
            options,
            cfg=cfg,
            callback=CallbackList(callbacks),
            open_publisher=open_publishing,
        )
        try:
            follower.follow()
        except RunInterruptedError:
            state = follower.trainer.state
            print(f"interrupted at step {state.step}; the same command resumes the run", file=sys.stderr)
            if follower.untrained_message:
                print(follower.untrained_message, file=sys.stderr)
            sys.exit(errors.INTERRUPTED)
    if topology.is_first:
        state = follower.trainer.state
        print(f"{state.windows_done} windows, step {state.step}, generation {state.generation}; run folder: {folder}")
        if follower.untrained_message:
            print(follower.untrained_message)


def evaluate_run(folder: Path, part: Part, *, best: bool) -> None:
    """Evaluate a run and print its metrics; results of the best weights are also stored in the run folder."""
    run_folder = RunFolder(folder)
    cfg = run_folder.config()
    topology = create_topology(cfg, ParallelConfig())  # tables can be read with any number of ranks
    with contextlib.ExitStack() as stack:
        stack.enter_context(progress_for(f"evaluate {folder}"))
        with run_folder.naming_config_file():
            trainer = stack.enter_context(contextlib.closing(Trainer(cfg, folder, topology)))
        evaluation = trainer.evaluate(part) if best else trainer.measure(part, best=False)
    if topology.is_first:
        _show(evaluation, _title(trainer, part))


def _title(trainer: Trainer, part: Part) -> str:
    """Return the title of a table of metrics, with the weights that were evaluated."""
    name = f"{trainer.folder.path.resolve().name} (recipe {trainer.cfg.name})"
    weights = "best validation epoch" if trainer.has_best else "last weights"
    return f"{name}: {part} split, {weights} (step {trainer.state.step}), 95% intervals"


def _show(evaluation: Evaluation, title: str) -> None:
    plain = evaluation.to_plain()
    Console().print(evaluation_table(plain, title=title))
    if rows := slice_rows(plain):
        print_rows(rows, title=SLICES_TITLE)
    if (verdict := verdict_on(plain["metrics"], plain["headline"])) is not None:
        print(verdict.sentence)
    for note in evaluation.notes:
        print(f"note: {note}")
