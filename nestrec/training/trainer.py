"""The training loop: `Trainer.train_step` shows one step from top to bottom.

The actions after a step (report, evaluation, checkpoint, published version) are decided once before it, as a
`StepPlan`. Versions are published by a publisher from `nestrec.exporters`, which is passed in (`OpenPublisher`).
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nestrec.balance import BalanceConfig
from nestrec.balance.balance_metrics import SlowRankDetector
from nestrec.base.config import dumps, to_plain
from nestrec.base.config_values import parse_time_ms
from nestrec.base.errors import UserError
from nestrec.base.failpoints import fail_point
from nestrec.data.batch_loader import Batch, BatchLoader, ContextParallelCollator, MicroBatch
from nestrec.data.samples.split import Part
from nestrec.data.samples.time_windows import TimeWindow
from nestrec.distributed import Topology
from nestrec.pipeline import LearningRates, LookaheadIterator, PipelineCore, StepTotals, TrainingStep
from nestrec.pipeline.exchange_window import Loss
from nestrec.pipeline.key_clustering import KeyClustering
from nestrec.pipeline.lanes import make_tracer
from nestrec.pipeline.micro_batch_tuner import MicroBatchTuner
from nestrec.pipeline.schedule_types import check_can_cache, check_can_split
from nestrec.tasks.task import Evaluation, make_loss_compute
from nestrec.tasks.task_registry import check_loss, check_loss_is_additive
from nestrec.trace import Span, Tracer
from nestrec.training.balance_controller import BalanceController, resolve_balance_config
from nestrec.training.callbacks import (
    Meter,
    ModelPublisher,
    OpenPublisher,
    TrainingCallback,
    gather_spans,
    mean_stage_ms,
    open_no_publisher,
)
from nestrec.training.run_checkpointer import RunCheckpointer, RunInterruptedError, StopRequest
from nestrec.training.run_config import RunConfig
from nestrec.training.run_folder import RunFolder
from nestrec.training.run_identity import changes_since, check_same_data
from nestrec.training.state import TrainState
from nestrec.training.training_session import Session, WindowEnd, WindowHook, check_has_windows, run_on_first_rank
from nestrec.training.validation import (
    check_dense_sharding,
    check_micro_batches,
    check_no_unused_options,
    check_same_config_on_all_ranks,
    check_split_not_empty,
    check_splits_not_empty,
    has_validation,
)
from nestrec.training.warm_start import WarmStart, check_same_warm_start

REPORT_EVERY_STEPS = 20
TRACED_STEPS = 2 * REPORT_EVERY_STEPS
"""Last step whose trace is written: one report interval after the warm-up steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Actions after a step, decided once before it; equal on all ranks, because the actions are collective."""

    number: int
    """Number of the step, from 1."""
    is_fence: bool
    """Whether the tables must be up to date after the step, because an action reads them."""
    stops: bool
    """Whether the run saves a checkpoint after the step and stops, because of a signal."""
    is_stop: bool
    """Whether the step is a fence only because the run stops."""
    ends_window: bool
    """Whether the batch is the last one of a time window."""
    reports: bool
    """Whether loss, throughput and stage times are recorded."""
    evaluates: bool
    """Whether the model is evaluated on the validation split."""
    saves: bool
    """Whether a checkpoint is saved."""
    publishes: bool
    """Whether a version is published; at the end of a time window, the window hooks publish it instead."""


class Trainer:
    """Trains a run in a run folder, and resumes from the last checkpoint if the folder has one.

    `train_step` shows what one step does. `__init__` builds the components in the order of their dependencies.
    """

    def __init__(
        self,
        cfg: RunConfig,
        folder: Path,
        topology: Topology,
        callback: TrainingCallback | None = None,
        *,
        warm_start: Path | None = None,
        window_hooks: Sequence[WindowHook] = (),
        generation: int | None = None,
        open_publisher: OpenPublisher = open_no_publisher,
    ):
        """Build the components of a run. Collective.

        Args:
            cfg: Config of the run.
            folder: Folder of the run.
            topology: Ranks of the run.
            callback: Notified of the progress of the run.
            warm_start: Folder of another run whose weights, rows and optimizer state this run starts with.
            window_hooks: Called at the end of each time window (batch.order=chronological).
            generation: Dataset generation for online training; None for the current one.
            open_publisher: Opens the publisher of model versions.
        """
        self._original_cfg = cfg  # recorded in the run folder as the user set it
        self._is_stream = generation is not None
        self.cfg = _config_of_stream(cfg) if self._is_stream else cfg
        self._topology = topology
        self._callback = callback or TrainingCallback()
        self._window_hooks = window_hooks
        self._open_publisher = open_publisher
        # Checked first, so that an invalid option is reported before the data is loaded.
        check_same_config_on_all_ranks(self.cfg, topology)
        check_dense_sharding(self.cfg, topology, is_stream=self._is_stream)
        self.session = Session.open(self.cfg, topology, generation)
        self._warm_start = None if warm_start is None else WarmStart.of(warm_start, self.session)
        self.windows = self._set_windows()
        _check_batches(self.cfg, self.session, is_stream=self._is_stream)
        self.folder = RunFolder(folder, is_writer=topology.is_first)
        self.tracer = make_tracer(topology.device, rank=topology.rank)
        self._balance = resolve_balance_config(self.cfg.balance, self.session.task)
        self.balance_controller = _build_balance_controller(self._balance, self.cfg, topology, self.tracer)
        self.micro_batch_tuner = MicroBatchTuner(self.cfg.batch, self.cfg.pipeline, topology)
        self.loader = self.make_loader()
        self.pipeline = _build_pipeline(self.cfg, self.session, self._loss, self.tracer)
        self.schedule = self.pipeline.schedule
        self.checkpointer = RunCheckpointer(self.session, self.folder, self._callback)
        self.publisher: ModelPublisher | None = None
        self._meter = Meter(tables=list(self.session.engine.tables))
        self._slow_rank = SlowRankDetector()
        self.state = TrainState()
        self.has_best = False
        """Whether the weights that were evaluated last are the best of the run."""
        self.window_arrival_times: dict[str, float] = {}
        """Arrival times of the events of the current stream window; empty without a stream."""

    def train(self) -> TrainState:
        """Train until the limits of the config are reached. Collective.

        Returns:
            The final state.

        Raises:
            RunInterruptedError: If a signal stopped the run; a checkpoint was saved.
        """
        check_no_unused_options(self.cfg, self.session.task)
        if self.session.ring.size == 1 and self.session.dense.sharded is None:
            check_loss_is_additive(self.cfg.task.kind, self.session.task, self.session.engine)
        with contextlib.ExitStack() as stack:
            run_on_first_rank(self._topology, lambda: stack.enter_context(self.folder.locked()))
            self._begin()
            self._report_if_finished()
            with StopRequest().handling_signals() as stop, self._open_feed() as feed:
                while not self._is_finished():
                    self.train_step(feed, stop)
                self.schedule.close()
            self._save()
            self._end()
            return self.state

    def train_step(self, feed: LookaheadIterator, stop: StopRequest) -> None:
        """Train on one global batch: fetch, forward and backward per micro-batch, reduce, update, log, checkpoint."""
        self._evaluate_window()  # test-then-train: before the model has trained on any event of the window

        with self.tracer.span("train.data.wait", kind="wait", lane="compute", step=self.state.step + 1):
            batch = next(feed)  # a pure function of the seed and the position, prefetched by the loader's threads

        plan = self._plan_step(batch)
        step = TrainingStep(
            number=plan.number,
            batch=batch,
            rates=self._learning_rates(),
            stop_requested=stop.is_set,  # summed over ranks with the loss, so that all of them stop after the same step
            is_fence=plan.is_fence,
            is_stop=plan.is_stop,
        )

        # Exchange keys -> read rows -> (exchange vectors -> forward, backward -> exchange gradients) per micro-batch
        # -> all-reduce dense gradients -> update rows and dense weights -> write back. The schedule starts later
        # batches as early as possible, but not across a fence. `serial` is the reference implementation of a step.
        totals = self.schedule.advance(step, feed)  # sums over ranks, still on the device

        self._count_step(plan, batch, totals)
        if plan.reports:
            self._report()
        if plan.evaluates:
            self._validate()
        if plan.stops:
            self._save()
            self._end()
            raise RunInterruptedError
        if plan.saves:
            self._save()
        if plan.ends_window:
            self._call_hooks()
        if plan.publishes:
            self._publish()  # after the checkpoint of the same step, from which a later start resumes

    def _count_step(self, plan: StepPlan, batch: Batch, totals: StepTotals) -> None:
        """Update the state of the run and the measurements, before the actions after the step read them."""
        self.state = self.state.after(batch, self.loader.order.next_position(batch.position))
        self._meter.watch(
            self.state.step, batch, totals
        )  # reads the totals of the previous step, so the host does not wait
        self.folder.record_progress(self.state.step)
        fail_point("train.step")
        self.balance_controller.record_step(batch)
        if plan.ends_window:
            self.state = self.state.after_window()

    def _plan_step(self, batch: Batch) -> StepPlan:
        """Decide the actions after the next step."""
        number = self.state.step + 1
        order = self.loader.order
        following = order.next_position(batch.position)
        ends_epoch = following.epoch > batch.position.epoch
        ends_window = order.is_last_of_window(batch.position)
        every_steps = self.cfg.training.checkpoint_every_steps
        is_save_due = every_steps is not None and number % every_steps == 0
        is_publish_due = self.publisher is not None and self.publisher.is_due(number)
        evaluates = (
            ends_epoch and has_validation(self.cfg) and following.epoch % self.cfg.training.eval_every_epochs == 0
        )
        is_due = ends_epoch or ends_window or number == self._last_step or is_save_due or is_publish_due
        # Stopping must not change the result of the run, so it waits until replicas of rows are synchronized.
        stops = self._meter.stop_requested and self.session.engine.replicas_synchronized_after(number)
        return StepPlan(
            number=number,
            is_fence=is_due or stops,
            stops=stops,
            is_stop=stops and not is_due,
            ends_window=ends_window,
            reports=number % REPORT_EVERY_STEPS == 0 or evaluates,
            evaluates=evaluates,
            saves=evaluates or ends_window or is_save_due,
            publishes=is_publish_due and not ends_window,
        )

    def make_loader(self) -> BatchLoader:
        """Return a data loader for the current samples of the task."""
        clustering = self.cfg.pipeline.clustering
        collator = self.session.task.collator
        ring = self.session.ring
        return BatchLoader(
            collator if ring.size == 1 else ContextParallelCollator(collator, ring.rank, ring.size),
            self.cfg.batch,
            seed=self.cfg.training.seed,
            partitioner=self.balance_controller.partitioner,
            cluster=None if clustering is None else KeyClustering(clustering),
            num_micro_batches_at=self.micro_batch_tuner.schedule.at,
        )

    def _loss(
        self, batch: MicroBatch, rows: Mapping[str, torch.Tensor], index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Compute the loss of the current task, which online training replaces for each dataset generation."""
        return check_loss(self.cfg.task.kind, self.session.task.loss(batch, rows, index))

    @contextlib.contextmanager
    def _open_feed(self, num_batches: int | None = None) -> Iterator[LookaheadIterator]:
        """Open an iterator over the next batches, at most `num_batches`; an error stops the threads of the pipeline."""
        left = num_batches if self._last_step is None else max(0, self._last_step - self.state.step)
        feed = LookaheadIterator(self.loader.iterate_from(self.state.position), left)
        try:
            yield feed
        except BaseException as error:
            self.schedule.abort(error)
            raise
        finally:
            feed.close()

    @property
    def ends_with_test(self) -> bool:
        """Whether the run is evaluated on the test split after training."""
        return not self.cfg.training.train_only and self.session.task.num_held_out("test") > 0

    def evaluate(self, part: Part = "test") -> Evaluation:
        """Evaluate the weights with the best validation score and write the results to the run folder. Collective."""
        evaluation = self.measure(part, best=True)
        self.folder.write_evaluation(evaluation, self.state.step, self.state.position.epoch)
        self._callback.on_evaluation(evaluation, self.state.step, self.state.position.epoch)
        self._check_folder()
        return evaluation

    def measure(self, part: Part, *, best: bool) -> Evaluation:
        """Evaluate with the best or the last weights. Collective."""
        data = self.session.dataset
        run_on_first_rank(
            self._topology, lambda: check_same_data(self.folder.path, data.folder, data.card, or_later=True)
        )
        if self.session.task.num_held_out(part) == 0:
            check_split_not_empty(self.cfg, part)
            remedy = self.session.task.remedy_if_empty
            raise UserError(
                f"the {part} split of the dataset is empty",
                option="data.folder",
                value=self.cfg.data.folder,
                remedy=remedy,
            )
        self.state, self.has_best = (
            self.checkpointer.restore_best() if best else (self.checkpointer.restore_last(), False)
        )
        return self.session.evaluate(part)

    def close(self) -> None:
        """Release the memory and files of the tables and of the run; not while `train` is running."""
        self.session.engine.close()
        self.folder.close()

    def _begin(self) -> None:
        """Resume from the newest checkpoint, or start from another run (warm start) or from step 0."""
        # Before the config is written, because both may reject a changed config or model.
        changes = run_on_first_rank(self._topology, self._changes_since_last_start) or []
        warm_start_notes: list[str] = []
        found = self.checkpointer.restore_or_start(lambda: self._initial_state(warm_start_notes))
        self.folder.write_start_files(
            self._original_cfg, dumps(self.session.dataset.card) + "\n", self._topology.device
        )
        task = self.session.task
        self.folder.write_parameters(sum(p.numel() for p in task.model.parameters()), task.tables)
        self.state = self.checkpointer.start(found)
        if self._warm_start is not None:
            self.folder.write_warm_start(self._warm_start.to_plain())
        if warm_start_notes:
            self._record_warm_start(warm_start_notes)
        elif self.state.step:
            self._record_resumption(changes)
        self._resume_choices()
        self._check_folder()
        self.publisher = self._open_publisher(
            self.cfg.publish,
            self.session,
            self.checkpointer.identity,
            self.state.step,
            warn=self._callback.on_warning,
            note=self._callback.on_message,
        )
        self.folder.record_progress(self.state.step, is_resume_point=True)
        self._callback.on_train_start(None if self._is_stream else self._total_steps(), self.state.step)
        if self.windows and self.state.windows_done and self.state.window_step == self.state.step:
            self._call_hooks(is_restart=True)
        self._start_watching()

    def _record_warm_start(self, texts: Sequence[str]) -> None:
        """Record and report what was loaded from another run."""
        self.folder.drop_metrics_after(-1)  # an earlier start may have ended before its first checkpoint
        for text in texts:
            self.folder.record("event", step=self.state.step, text=text)
            self._callback.on_message(text)

    def _record_resumption(self, changes: Sequence[str]) -> None:
        """Record and report the step the run resumes from, the number of ranks, lost steps, and changed options."""
        step = self.state.step
        ranks = self._topology.world
        lost = self.folder.lost_progress_after(step)
        self.folder.drop_metrics_after(step)
        self.folder.record("event", step=step, text=f"resumed from step {step}", ranks=ranks)
        if lost is not None:
            self.folder.record("event", step=step, text=str(lost), lost_steps=lost.steps, lost_s=lost.seconds)
            self._callback.on_message(f"resuming from step {step} on {ranks} rank{'s' if ranks > 1 else ''}: {lost}")
        for change in changes:
            self.folder.record("event", step=step, text=f"changed: {change}")
            self._callback.on_warning(f"changed since the run was last started: {change}")

    def _resume_choices(self) -> None:
        """Restore measured choices of an earlier start that still apply: cost model, micro-batches, loss variant."""
        known, dropped = self.balance_controller.resume(
            self.state.cost_changes, self.state.step, fitted_from=self.state.cost
        )
        for note in dropped:
            self.folder.record("event", step=self.state.step, text=note)
            self._callback.on_warning(note)
        self.state = replace(
            self.state,
            cost=self._balance.cost,
            cost_changes=known,
            window_changes=self.micro_batch_tuner.resume(self.state.window_changes, self.state.step),
            loss_variant=self._choose_loss_variant(self.state.loss_variant),
        )

    def _set_windows(self) -> list[TimeWindow]:
        """Return the time windows of a chronological run, and set them in the task."""
        if self.cfg.batch.order == "shuffled" or self._is_stream:
            return []
        start_ms = parse_time_ms(self.cfg.windows.start_time, "windows.start_time")
        source_run = None
        if start_ms is None and self._warm_start is not None:
            start_ms = self._warm_start.first_new_ms
            source_run = self._warm_start.run
        windows = self.session.task.windows_by_time(self.cfg.windows, start_ms or 0)
        check_has_windows(windows, start_ms or 0, source_run)
        self.session.task.set_windows(windows, None, replay_fraction=self.cfg.windows.replay_fraction)
        return windows

    def _initial_state(self, notes: list[str]) -> TrainState:
        """Return the state of a new run after a warm start, if any, whose description is appended to `notes`."""
        if self._warm_start is None:
            return TrainState()
        state, texts = self._warm_start.load(self.session, self._callback.on_warning)
        notes += texts
        return state

    def train_window(self, window: TimeWindow, generation: int, stop: StopRequest) -> None:
        """Evaluate, train on and save a stream window, whose dataset generation the session has. Collective.

        If the run was interrupted within the window, it resumes there.
        """
        self.windows = [window]
        self.loader = self.make_loader()
        if self.state.generation != generation or self.state.position.step == 0:
            self.state = self.state.at_window_start(generation)
        epoch = self.state.position.epoch
        left = self.loader.order.steps_in_epoch(epoch) - self.state.position.step
        with self._open_feed(left) as feed:
            while self.state.position.epoch == epoch:
                self.train_step(feed, stop)

    def _evaluate_window(self) -> None:
        """If the next batch starts a time window, evaluate the model on it before training (test-then-train)."""
        if not self.windows or (self.state.position.epoch > 0 and not self._is_stream):
            return  # in later epochs the model has already been trained on the window
        number = self.windows[self.loader.order.window_of(self.state.position)].number
        if number < self.state.windows_predicted:
            return
        self._meter.flush()
        window = self.windows[0 if self._is_stream else number]
        step = self.state.step
        metrics = self.session.task.evaluate_window(self.session.engine, window)
        self.state = self.state.after_window_evaluation(number)
        self.folder.write_window(window, metrics, step)
        self._callback.on_window_evaluation(window, metrics, step)
        self.pipeline.submit_collective(self._check_folder)
        self._start_watching()

    def _call_hooks(self, *, is_restart: bool = False) -> None:
        """Call the window hooks after the checkpoint of the window is written."""
        self.checkpointer.close()
        number = self.state.windows_done - 1
        window = self.windows[number % len(self.windows)]
        published = [] if self.publisher is None else [self.publisher.on_window]
        for hook in [*self._window_hooks, *published]:
            hook(
                WindowEnd(
                    session=self.session,
                    state=self.state,
                    number=number,
                    from_ms=window.from_ms,
                    to_ms=window.to_ms,
                    num_events=window.num_events,
                    is_restart=is_restart,
                    **self.window_arrival_times,
                )
            )

    def _changes_since_last_start(self) -> list[str]:
        """Describe options that changed since the last start; raise a UserError if they must not change."""
        before = self.folder.resumed_config()
        if before is None:
            return []
        check_same_warm_start(self.folder, self._warm_start)
        data = self.session.dataset
        check_same_data(self.folder.path, data.folder, data.card, or_later=self._is_stream)
        return changes_since(before, self._original_cfg, self.folder.config_file)

    def _choose_loss_variant(self, saved: str | None) -> str | None:
        """Return the loss variant: the saved one, or one chosen by measurement; None if it is fixed. Collective."""
        choice = self.session.task.choose_loss_variant(self.cfg.batch, self._topology, saved)
        if choice is None:
            return None
        variant, measured_ms = choice
        if variant != saved:
            self.folder.record(
                "event", step=self.state.step, text=f"loss variant: {variant} (milliseconds: {measured_ms})"
            )
        return variant

    def _validate(self) -> None:
        self._meter.flush()
        evaluation = self.session.evaluate("valid")
        if self.state.best_score is None and math.isnan(evaluation.score):
            self._callback.on_warning(
                f"{evaluation.main_metric} is undefined on the validation split, which needs events of both labels: "
                "the last weights count as the best"
            )
        self.state = self.state.after_evaluation(evaluation.score)
        self.folder.write_evaluation(evaluation, self.state.step, self.state.position.epoch)
        self._callback.on_evaluation(evaluation, self.state.step, self.state.position.epoch)
        self.pipeline.submit_collective(self._check_folder)
        if self.state.best_step == self.state.step:
            self.checkpointer.mark_best()
        self._start_watching()  # the duration of an evaluation must not count as step time

    def _save(self) -> None:
        self._meter.flush()
        self.folder.record_progress(self.state.step, is_resume_point=True)
        self.checkpointer.save(self.state)

    def _publish(self) -> None:
        self._meter.flush()  # raises if the loss is not finite, before a version is published
        if self.publisher is not None:
            with self.session.dense.averaged():
                self.publisher.publish(self.session, self.state.step)

    def _end(self) -> None:
        """Wait until all checkpoints are written, and publish the final version."""
        self.checkpointer.close()
        if self.publisher is not None:
            with self.session.dense.averaged():
                self.publisher.publish(self.session, self.state.step)
            self.publisher.close()

    def _report(self) -> None:
        spans = self.tracer.take()
        self._meter.flush()  # reads the loss of this step; the device is done, because its spans were taken
        epoch = self.state.position.epoch
        loss = self._meter.loss
        values = {
            "loss": loss,
            "learning_rate": self._learning_rates().dense,
            **self._meter.speeds(),
            "parts": mean_stage_ms(spans),
        }
        values["tables"] = self.session.engine.store_statistics()  # of this rank's shards only
        num_loaded, seconds = self.loader.stats.pop_counts()
        if num_loaded:  # capacity of all ranks' loader threads, assuming that no rank is slower than this one
            values["readable_per_s"] = num_loaded / seconds * self.cfg.batch.num_workers * self._topology.world
        balance = self.pipeline.submit_collective(lambda: self.balance_controller.report(spans, self.state.step))
        values |= balance
        self.folder.record("step", step=self.state.step, epoch=epoch, **values)
        self._callback.on_step_report(self.state.step, epoch, values)
        self._warn_of_slow_rank(balance.get("slow_rank"), balance.get("slow_factor", 0.0))
        if self.state.step <= TRACED_STEPS:
            self.folder.write_trace(self.pipeline.submit_collective(lambda: gather_spans(self._topology, spans)))
        self._decide(spans)
        self.pipeline.submit_collective(self._check_folder)

    def _warn_of_slow_rank(self, rank: int | None, factor: float) -> None:
        if self._slow_rank.should_warn(rank):
            text = f"rank {rank} is slow: it takes {factor:.1f} times as long as the others per token"
            self.folder.record("event", step=self.state.step, text=text)
            self._callback.on_warning(text)

    def _check_folder(self) -> None:
        """Raise a UserError on all ranks if rank 0 could not write to the run folder. Collective."""
        run_on_first_rank(self._topology, self.folder.check)

    def _decide(self, spans: Sequence[Span]) -> None:
        """Adapt cost model, shares and micro-batches to measured times.

        A change is equal on all ranks, logged, saved in checkpoints, and takes effect some batches later.
        """
        step = self.state.step
        position = self.state.position
        after = self.loader.order.next_position
        before = self.state.cost_changes[-1].tuning if self.state.cost_changes else self._balance.power_tuning
        cost = self.balance_controller.decide(step, position, after)
        if cost is not None:
            self.state = replace(self.state, cost_changes=(*self.state.cost_changes, cost))
            what = "cost of a sample fitted" if cost.tuning == before else "shares of ranks tuned"
            self.folder.record("event", step=step, text=f"{what}: {to_plain(cost)}")
        window = self.pipeline.submit_collective(lambda: self.micro_batch_tuner.decide(spans, step, position, after))
        if window is not None:
            self.state = replace(self.state, window_changes=(*self.state.window_changes, window))
            self.folder.record("event", step=step, text=f"micro-batches: {to_plain(window)}")

    def _start_watching(self) -> None:
        self._meter.start()
        self.balance_controller.start()

    def _learning_rates(self) -> LearningRates:
        return self.cfg.optimizer.rates(self.state.step + 1)

    def _is_finished(self) -> bool:
        return bool(self.state.reached_limits(self.cfg.training))

    def _report_if_finished(self) -> None:
        """Notify the user if a resumed run has already reached its limits, so that nothing is trained."""
        limits = [
            f"--training.{name} above {reached}"
            for name, reached in self.state.reached_limits(self.cfg.training).items()
        ]
        if limits:
            after = f"after step {self.state.step}"
            self._callback.on_message(f"training is complete {after}: to continue training, set {' and '.join(limits)}")

    @property
    def _last_step(self) -> int | None:
        """Last step of the run if `training.max_steps` is set, otherwise None."""
        last = self.cfg.training.max_steps
        return None if last is None else self.state.first_step + last

    def _total_steps(self) -> int:
        cfg = self.cfg.training
        by_epochs = self.loader.order.steps_in_epoch(0) * cfg.epochs
        own = min(by_epochs, cfg.max_steps) if cfg.max_steps is not None else by_epochs
        return self.state.first_step + own


def _config_of_stream(cfg: RunConfig) -> RunConfig:
    """Return the config for online training, which has no epochs and no end: each window is evaluated instead."""
    return replace(
        cfg, training=replace(cfg.training, eval_every_epochs=0, max_steps=None, early_stopping_patience=None)
    )


def _check_batches(cfg: RunConfig, session: Session, *, is_stream: bool) -> None:
    """Raise a UserError if the data or the task does not support the configured batches."""
    check_can_split(session.task.couples_samples, cfg.batch.num_micro_batches)
    if cfg.pipeline.window_cache:
        check_can_cache(cfg.batch.num_micro_batches)
    check_splits_not_empty(cfg, session.task)
    check_micro_batches(cfg, None if is_stream else session.task.collator.tokens)
    session.task.check_batches(cfg.batch, session.topology.world)


def _build_balance_controller(
    balance: BalanceConfig, cfg: RunConfig, topology: Topology, tracer: Tracer
) -> BalanceController:
    return BalanceController(balance, num_prefetched=cfg.batch.prefetch_batches + 1, topology=topology, tracer=tracer)


def _build_pipeline(cfg: RunConfig, session: Session, loss: Loss, tracer: Tracer) -> PipelineCore:
    sharded = session.dense.sharded
    compute = make_loss_compute(
        session.task,
        session.topology.device,
        cfg.training.precision,
        loss=loss,
        empty_pass=None if sharded is None else sharded.empty_pass,
    )
    return PipelineCore.build(compute, session.engine, session.dense, cfg.pipeline, tracer=tracer, context=session.ring)
