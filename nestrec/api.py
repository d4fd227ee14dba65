"""Python API: train, evaluate, follow, export and publish. `nestrec` exports these names, and the CLI calls them.

Train a recipe and read its metrics:

    run = nestrec.train("demo", {"training.epochs": 2})
    print(run.evaluation.score, run.evaluation.metrics["model"])

Make the trained model available to servers, as a servable folder or as the newest version at an address that they
follow:

    run = nestrec.train("demo", output="runs/python")
    manifest = nestrec.export(run, "models/python", {"table_dtype": "int8"})
    nestrec.publish(run, "published/python")

Under torchrun, every rank makes the same call and the ranks share the work. A call destroys the process groups that it
created, even if it fails; a default process group that the caller created before is reused and kept.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from nestrec.base.config_overrides import apply_overrides, override_texts
from nestrec.base.config_values import from_plain
from nestrec.base.cuda import resolve_device
from nestrec.base.errors import UserError, did_you_mean, require
from nestrec.base.files import parse_path
from nestrec.data.dataset import Dataset
from nestrec.data.samples.split import Part
from nestrec.distributed import Topology
from nestrec.distributed.topology import ParallelConfig, check_device
from nestrec.exporters.servable_writer import ExportConfig, export_run
from nestrec.exporters.version_publisher import PublishRunConfig, open_publishing, publish_run
from nestrec.serving.model.servable_spec import ServableManifest
from nestrec.serving.versions.version_manifest import VersionManifest
from nestrec.serving.versions.version_store import VersionStep
from nestrec.tasks.task import Evaluation
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.recipes import RECIPES, auto_recipe
from nestrec.training.recipes import recipe as named_recipe
from nestrec.training.run_config import RunConfig
from nestrec.training.run_folder import RunFolder
from nestrec.training.stream_trainer import StreamTrainer, stream_config
from nestrec.training.trainer import Trainer
from nestrec.training.training_session import WindowHook

if TYPE_CHECKING:
    from nestrec.inference.recommender import Recommender


def resolve_config(recipe: str | Path | RunConfig, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the configuration of a run with overrides applied.

    Args:
        recipe: Name of a recipe, path of the config.json of an earlier run, or a config.
        overrides: Maps dotted option names to values, or to text as typed on the command line.
    """
    texts = override_texts(overrides)
    if recipe == auto_recipe.NAME:
        return _auto_config(texts)
    base = recipe if isinstance(recipe, RunConfig) else _named_config(str(recipe))
    # A recipe may generate the synthetic dataset that it names. In a folder that the user named, that would hide a
    # misspelled path.
    own_folder = {"data.synthetic": "none"} if "data.folder" in texts else {}
    return _overridden(base, {**own_folder, **texts})


def _overridden(base: RunConfig, texts: dict[str, str]) -> RunConfig:
    """Return the config with overrides, without the reasons of the options that are overridden."""
    reasons = {name: why for name, why in base.reasons.items() if name not in texts}
    return replace(apply_overrides(base, texts), reasons=reasons)


def _auto_config(texts: dict[str, str]) -> RunConfig:
    """Return the config that fits the statistics of a dataset; overrides take precedence."""
    if "data.folder" not in texts:
        remedy = "name the dataset that `nestrec prepare` wrote: --data.folder data/mine"
        raise UserError("this recipe needs a dataset", option="RECIPE", value=auto_recipe.NAME, remedy=remedy)
    options = dict(texts)
    kind = options.pop("task.kind", None)
    if kind is not None and kind not in get_args(auto_recipe.TaskKind):
        remedy = did_you_mean(kind, get_args(auto_recipe.TaskKind))
        raise UserError("the recipe auto does not support this task", option="task.kind", value=kind, remedy=remedy)
    has_own_split = any(name.startswith("task.split.") for name in options)
    dataset = Dataset.open(texts["data.folder"])
    base = auto_recipe.auto(dataset, kind, has_own_split=has_own_split)  # type: ignore[arg-type]
    return _overridden(base, options)


def _named_config(name: str) -> RunConfig:
    is_run = name not in RECIPES and Path(name, "config.json").exists()  # a run folder may be named like a recipe
    remedy = f"to resume the run: nestrec train {name}/config.json --output {name}"
    require(not is_run, "is a run folder", option="RECIPE", value=name, remedy=remedy)
    return _saved_config(Path(name)) if name.endswith(".json") else named_recipe(name)


def _saved_config(file: Path) -> RunConfig:
    try:
        plain = json.loads(file.read_text())
        if not isinstance(plain, dict):
            raise ValueError("it must contain a JSON object")
        return from_plain(RunConfig, plain)
    except (OSError, ValueError, UserError) as error:
        remedy = "name a config.json that `nestrec train` wrote, or a recipe (see `nestrec recipes`)"
        raise UserError(f"cannot be read: {error}", option="RECIPE", value=str(file), remedy=remedy) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A trained run: its folder, its number of steps and its test metrics.

    `train` and `follow` return it. A `Run` is a path-like object, so that every function that takes a run folder also
    takes a `Run`:

        >>> run = nestrec.train("demo", {"training.epochs": 1}, output="runs/first")
        >>> run.folder
        PosixPath('runs/first')
        >>> recommender = run.load()
    """

    folder: Path
    """Run folder with the config, metrics, evaluations and checkpoints; `nestrec report` renders it as an HTML page."""
    steps: int
    """Number of training steps of the weights with the best validation score."""
    evaluation: Evaluation | None
    """Metrics of the best weights and of the baselines on the test split; None if the dataset has no test split or if
    `training.train_only` is set."""

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    def load(self) -> "Recommender":
        """Load the best weights into a `Recommender`; see `nestrec.load`."""
        from nestrec.inference.recommender import load

        return load(self)


def train(
    recipe: str | Path | RunConfig,
    overrides: Mapping[str, Any] | None = None,
    *,
    output: Path | str | None = None,
    callback: TrainingCallback | None = None,
    warm_start: Run | Path | str | None = None,
    window_hooks: Sequence[WindowHook] = (),
) -> Run:
    """Train a recipe, then evaluate the best weights on the test split.

    Under torchrun every rank makes the same call.

    Args:
        recipe: Name of a recipe (`nestrec recipes` lists them), path of the config.json of a run, or a config.
        overrides: Maps dotted option names to values, `{"training.epochs": 2}` or `{"training": {"epochs": 2}}`;
            `nestrec options train RECIPE` lists the options. A mapping with a `kind`, such as an encoder, replaces the
            whole section.
        output: Run folder, `runs/NAME` by default. If the folder has checkpoints, training resumes from the last one.
        callback: Receives the training progress.
        warm_start: Run that provides the initial weights, embedding tables and optimizer state. It must have been
            trained on the same dataset or on an earlier generation of it (see `nestrec.append`).
        window_hooks: Functions that are called after each time window (only with `batch.order=chronological`).

    Returns:
        The run, with its folder and test metrics.

    Raises:
        UserError: An option is invalid, or the run folder does not match the config.
        nestrec.training.run_checkpointer.RunInterruptedError: The process received SIGTERM or SIGINT; a checkpoint was
            saved, and the same call resumes the run.

    Example:
        >>> run = nestrec.train("demo", {"training.epochs": 2}, output="runs/demo")
        >>> run.evaluation.metrics["model"]
    """
    cfg = resolve_config(recipe, overrides)
    folder = Path("runs") / cfg.name if output is None else parse_path(output, "output")
    _check_hooks(callback, window_hooks)
    warm_start_folder = None if warm_start is None else run_folder_path(warm_start)
    with contextlib.ExitStack() as stack:
        topology = stack.enter_context(_scoped_topology(cfg, cfg.parallel))
        new_trainer = Trainer(
            cfg,
            folder,
            topology,
            callback,
            warm_start=warm_start_folder,
            window_hooks=window_hooks,
            open_publisher=open_publishing,
        )
        trainer = stack.enter_context(contextlib.closing(new_trainer))
        trainer.train()
        evaluation = trainer.evaluate("test") if trainer.ends_with_test else None
        return Run(folder=folder, steps=trainer.state.step, evaluation=evaluation)


def evaluate(run: Run | Path | str, part: Part = "test", *, best: bool = True) -> Evaluation:
    """Evaluate a run and its baselines on held-out data.

    Results of the best weights are also stored in `RUN/eval`.

    Args:
        run: Run that `train` returned, or its folder.
        part: Data split to evaluate on, `"valid"` or `"test"`.
        best: Use the weights with the best validation score; False uses the last weights.

    Returns:
        The metrics of the model and of each baseline.

    Raises:
        UserError: The folder is not a run, or the dataset does not have this split.

    Example:
        >>> evaluation = nestrec.evaluate("runs/demo", "valid")
        >>> evaluation.metrics["model"]
    """
    if part not in get_args(Part):
        remedy = did_you_mean(str(part), get_args(Part))
        raise UserError("no such data split", option="part", value=part, remedy=remedy)
    folder = run_folder_path(run)
    cfg = RunFolder(folder).config()
    with contextlib.ExitStack() as stack:
        # A checkpoint can be read with any mesh, so the parallel section of the run is not needed.
        topology = stack.enter_context(_scoped_topology(cfg, ParallelConfig()))
        with RunFolder(folder).naming_config_file():
            trainer = stack.enter_context(contextlib.closing(Trainer(cfg, folder, topology)))
        return trainer.evaluate(part) if best else trainer.measure(part, best=False)


def follow(
    source: Path | str,
    run: Run | Path | str,
    overrides: Mapping[str, Any] | None = None,
    *,
    callback: TrainingCallback | None = None,
    window_hooks: Sequence[WindowHook] = (),
) -> Run:
    """Train a run online (streaming training) on the events of a source, one window at a time.

    The events are appended to the dataset of the run. The function returns after the source has been idle for
    `stop_after_idle_s`; by default it runs until it is interrupted.

    Args:
        source: Folder, or Kafka topic as `kafka://BROKERS/TOPIC`.
        run: Run to continue, as `train` returned it, or its folder.
        overrides: Maps dotted option names to values; `nestrec options train-stream` lists the options.
        callback: Receives the training progress.
        window_hooks: Functions that are called after each window.

    Returns:
        The continued run, without test metrics.

    Raises:
        UserError: An option is invalid, or the source cannot be read.
        nestrec.training.run_checkpointer.RunInterruptedError: The process received SIGTERM or SIGINT; a checkpoint was
            saved, and the same call resumes the run.

    Example:
        >>> nestrec.follow("incoming/", "runs/demo", {"window.events": 1000, "stop_after_idle_s": 60})
    """
    folder = run_folder_path(run)
    parse_path(source, "source")  # only checked: a URL would not survive the conversion to a path
    _check_hooks(callback, window_hooks)
    cfg = RunFolder(folder).config()
    options = stream_config(Path(cfg.data.folder), override_texts(overrides))
    with contextlib.ExitStack() as stack:
        topology = stack.enter_context(_scoped_topology(cfg, cfg.parallel))
        follower = StreamTrainer(
            str(source),
            folder,
            topology,
            options,
            cfg=cfg,
            callback=callback,
            window_hooks=window_hooks,
            open_publisher=open_publishing,
        )
        stack.enter_context(contextlib.closing(follower.trainer))
        state = follower.follow()
        if callback is not None and follower.untrained_message:
            callback.on_message(follower.untrained_message)
        return Run(folder=folder, steps=state.step, evaluation=None)


def create_topology(cfg: RunConfig, ranks: ParallelConfig) -> Topology:
    """Return the ranks that torchrun started, or a single rank, and set the number of torch threads."""
    if cfg.training.num_threads is not None:
        torch.set_num_threads(cfg.training.num_threads)
    device = resolve_device(cfg.training.device)
    check_device(device, "training.device")
    return Topology.from_environment(device, ranks)


@contextlib.contextmanager
def _scoped_topology(cfg: RunConfig, ranks: ParallelConfig) -> Iterator[Topology]:
    """Yield the ranks of one call; afterwards, destroy the process groups and restore the number of threads."""
    threads = torch.get_num_threads()
    try:
        with Topology.scoped(lambda: create_topology(cfg, ranks)) as topology:
            yield topology
    finally:
        torch.set_num_threads(threads)


def _check_hooks(callback: Any, hooks: Any) -> None:
    """Check the callbacks before training starts, not at their first call."""
    if callback is not None and not isinstance(callback, TrainingCallback):
        remedy = "pass an instance of a subclass of nestrec.training.callbacks.TrainingCallback"
        raise UserError("must be a TrainingCallback", option="callback", value=callback, remedy=remedy)
    if not isinstance(hooks, Sequence) or not all(map(callable, hooks)):
        remedy = "pass functions that take one nestrec.training.training_session.WindowEnd"
        raise UserError("must be a list of functions", option="window_hooks", value=hooks, remedy=remedy)


def run_folder_path(run: Any) -> Path:
    """Return the folder of a `Run`, or of a path that a caller passed as a run."""
    remedy = "pass the Run that nestrec.train returned, or its folder"
    require(isinstance(run, Run | Path | str), "must be a run or a path", option="run", value=run, remedy=remedy)
    return run.folder if isinstance(run, Run) else Path(run)


def export(
    run: Run | Path | str, output: Path | str, overrides: Mapping[str, Any] | None = None, *, best: bool = True
) -> ServableManifest:
    """Export a run as a servable: a model folder that `nestrec serve` loads.

    Args:
        run: Run that `train` returned, or its folder.
        output: Folder to write; it must not exist yet.
        overrides: Maps dotted option names to values, such as `{"dtype": "bfloat16"}`; `nestrec options export` lists
            the options.
        best: Export the weights with the best validation score; False exports the last weights.

    Returns:
        The manifest of the servable, with the model version and, for a quantized export, the measured loss of quality.

    Raises:
        UserError: The folder exists, an option is invalid, or the run cannot be exported.

    Example:
        >>> manifest = nestrec.export("runs/demo", "models/demo", {"table_dtype": "int8"})
    """
    cfg = apply_overrides(ExportConfig(), override_texts(overrides))
    folder = run_folder_path(run)
    servable_folder = parse_path(output, "output")
    return export_run(
        folder,
        servable_folder,
        best=best,
        defaults=cfg.defaults,
        search=cfg.search,
        dtype=cfg.dtype,
        table_dtype=cfg.table_dtype,
        kv_cache_dtype=cfg.kv_cache_dtype,
        device=cfg.device,
    )


def publish(
    run: Run | Path | str, address: Path | str, overrides: Mapping[str, Any] | None = None, *, best: bool = True
) -> VersionManifest:
    """Publish a run as the newest full model version at an address that servers follow.

    The run must not be training at the same time.

    Args:
        run: Run that `train` returned, or its folder.
        address: Folder, or any URL that fsspec supports (`s3://...`, `gs://...`).
        overrides: Maps dotted option names to values, such as `{"max_versions": 10}`; `nestrec options publish` lists
            the options.
        best: Publish the weights with the best validation score; False publishes the last weights.

    Returns:
        The manifest of the published version.

    Raises:
        UserError: An option is invalid, or the address cannot be written.

    Example:
        >>> nestrec.publish("runs/demo", "s3://models/demo", {"max_versions": 10})
    """
    return publish_version(run, address, overrides, best=best).manifest


def publish_version(
    run: Run | Path | str, address: Path | str, overrides: Mapping[str, Any] | None = None, *, best: bool = True
) -> VersionStep:
    """Publish a run like `publish`, and return the version together with its name."""
    cfg = apply_overrides(PublishRunConfig(), override_texts(overrides))
    folder = run_folder_path(run)
    parse_path(address, "address")  # only checked: a URL would not survive the conversion to a path
    return publish_run(folder, str(address), cfg, best=best)
