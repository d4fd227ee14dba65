"""The training loop: `Trainer.train_step` shows one step from top to bottom.

What follows a step (a report, an evaluation, a save, a published version) is decided once before it, as a `StepPlan`.
How versions are published is the business of `nestrec.exporters`, whose publisher is handed in (`OpenPublishing`).
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nestrec.balance import BalanceConfig
from nestrec.balance.balance_metrics import SlowRankWatch
from nestrec.base.config import dumps, to_plain
from nestrec.base.config_values import moment_ms
from nestrec.base.errors import UserError
from nestrec.base.failpoints import fail_point
from nestrec.data.batch_loader import Batch, BatchLoader, ContextParallelCollator, MicroBatch
from nestrec.data.samples.split import Part
from nestrec.data.samples.time_windows import TimeWindow
from nestrec.distributed import Topology
from nestrec.pipeline import LearningRates, LookaheadIterator, PipelineCore, StepTotals, TrainingStep
from nestrec.pipeline.exchange_window import Loss
from nestrec.pipeline.key_clustering import ByKeys
from nestrec.pipeline.lanes import make_tracer
from nestrec.pipeline.micro_batch_tuner import MicroBatchTuner
from nestrec.pipeline.schedule_types import check_can_cache, check_can_cut
from nestrec.tasks.task import Evaluation, compute_of
from nestrec.tasks.task_registry import check_loss, check_loss_is_sum
from nestrec.trace import Span, Tracer
from nestrec.training.balance_controller import BalanceController, settled
from nestrec.training.callbacks import (
    Meter,
    ModelPublisher,
    OpenPublishing,
    TrainingCallback,
    cannot_publish,
    parts_ms,
    spans_of_ranks,
)
from nestrec.training.run_checkpointer import RunCheckpointer, RunInterruptedError, StopRequest
from nestrec.training.run_config import RunConfig
from nestrec.training.run_folder import RunFolder
from nestrec.training.run_identity import changes_since, check_same_data
from nestrec.training.state import TrainState
from nestrec.training.training_session import Session, WindowEnd, WindowHook, check_any_window, on_first
from nestrec.training.validation import (
    agree_on_config,
    check_dense,
    check_holds_out,
    check_micro_batches,
    check_options_are_used,
    check_parts,
    validates,
)
from nestrec.training.warm_start import WarmStart, check_same_beginning

REPORT_EVERY_STEPS = 20
TRACED_STEPS = 2 * REPORT_EVERY_STEPS
"""The trace of the steps before the last report up to this step is kept: later, the first ones are warm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What follows a step, decided once before it. The same on every rank, because what follows is collective."""

    number: int
    """Number of the step, from 1."""
    is_fence: bool
    """Whether the tables must be complete after the step, because something reads them."""
    stops: bool
    """Whether the run is saved after the step and ends, because a signal asked it to stop."""
    is_stop: bool
    """Whether the step is a fence for no other reason than the stop."""
    ends_window: bool
    """Whether the batch is the last one of a window of time."""
    reports: bool
    """Whether loss, speeds and times are recorded."""
    evaluates: bool
    """Whether the model is measured on the validation part."""
    saves: bool
    """Whether a checkpoint is written."""
    publishes: bool
    """Whether a version is published. The end of a window publishes one by itself, through its hooks."""


class Trainer:
    """Trains a recipe in a run folder; a later trainer in the same folder continues from the last checkpoint.

    `train_step` shows what one step does. `__init__` lists the parts in the order in which they depend on each other.
    """

    def __init__(
        self,
        cfg: RunConfig,
        folder: Path,
        topology: Topology,
        listener: TrainingCallback | None = None,
        *,
        start_from: Path | None = None,
        window_hooks: Sequence[WindowHook] = (),
        generation: int | None = None,
        open_publishing: OpenPublishing = cannot_publish,
    ):
        """start_from: another run, whose weights, rows and optimiser state this one begins with.

        window_hooks: called when a window of time has ended (batch.order chronological). generation: of the dataset,
        for a run that follows a stream; none: the one in force. open_publishing: opens the publisher of versions.
        """
        self._given = cfg  # recorded in the run folder as the user gave it
        self._follows = generation is not None
        self.cfg = _config_of_stream(cfg) if self._follows else cfg
        self._topology = topology
        self._listener = listener or TrainingCallback()
        self._window_hooks = window_hooks
        self._open_publishing = open_publishing
        # Before anything is built: a mistake in the options must not cost the time of loading data.
        agree_on_config(self.cfg, topology)
        check_dense(self.cfg, topology, follows=self._follows)
        self.session = Session.open(self.cfg, topology, generation)
        self._beginning = None if start_from is None else WarmStart.of(start_from, self.session)
        self.windows = self._take_windows()
        _check_batches(self.cfg, self.session, follows=self._follows)
        self.folder = RunFolder(folder, is_writer=topology.is_first)
        self.tracer = make_tracer(topology.device, rank=topology.rank)
        self._balance = settled(self.cfg.balance, self.session.task)
        self.balancing = _build_balancing(self._balance, self.cfg, topology, self.tracer)
        self.window = MicroBatchTuner(self.cfg.batch, self.cfg.pipeline, topology)
        self.batches = self.make_batches()
        self.pipeline = _build_pipeline(self.cfg, self.session, self._loss, self.tracer)
        self.schedule = self.pipeline.schedule
        self.saving = RunCheckpointer(self.session, self.folder, self._listener)
        self.publishing: ModelPublisher | None = None
        self._meter = Meter(tables=list(self.session.engine.tables))
        self._slow_rank = SlowRankWatch()
        self.state = TrainState()
        self.has_best = False
        """Whether the weights that were measured last are the best of the run."""
        self.window_times: dict[str, float] = {}
        """When the events of the window arrived, if it is a window of a stream."""

    def train(self) -> TrainState:
        """Train to the end of the recipe, or until a signal asks the run to stop (`RunInterruptedError`, after
        saving)."""
        check_options_are_used(self.cfg, self.session.task)
        if self.session.ring.size == 1 and self.session.dense.sharded is None:
            check_loss_is_sum(self.cfg.task.kind, self.session.task, self.session.engine)
        with contextlib.ExitStack() as held:
            on_first(self._topology, lambda: held.enter_context(self.folder.kept_to_itself()))
            self._begin()
            self._tell_if_finished()
            with StopRequest().listening() as stop, self._open_feed() as feed:
                while not self._is_finished():
                    self.train_step(feed, stop)
                self.schedule.close()
            self._save()
            self._end()
            return self.state

    def train_step(self, feed: LookaheadIterator, stop: StopRequest) -> None:
        """Train on one global batch: fetch, forward and backward per micro-batch, reduce, update, log, checkpoint."""
        self._predict_window()  # a window is measured before the model has trained on any of its events

        with self.tracer.span("train.data.wait", kind="wait", lane="compute", step=self.state.step + 1):
            batch = next(feed)  # a pure function of the seed and the position, assembled ahead by the loader's threads

        plan = self._plan_step(batch)
        step = TrainingStep(
            number=plan.number,
            batch=batch,
            rates=self._rates(),
            wants_stop=stop.is_set,  # summed over ranks with the loss, so that all of them stop after the same step
            is_fence=plan.is_fence,
            is_stop=plan.is_stop,
        )

        # route keys -> fetch rows -> (vectors -> forward, backward -> gradients) per micro-batch -> reduce dense
        # gradients -> update rows and dense weights -> write back. The schedule begins with later batches as early as
        # it may: up to a fence, after which the tables must be complete. `serial` is the definition of a step.
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
            self._publish()  # after the save of the same step, from which a later start continues

    def _count_step(self, plan: StepPlan, batch: Batch, totals: StepTotals) -> None:
        """Count a step in the state of the run, and measure it, before anything that follows the step reads either."""
        self.state = self.state.after(batch, self.batches.order.after(batch.position))
        self._meter.watch(self.state.step, batch, totals)  # reads the totals of the step before: no wait for the device
        self.folder.reached(self.state.step)
        fail_point("train.step")
        self.balancing.watch(batch)
        if plan.ends_window:
            self.state = self.state.ended_window()

    def _plan_step(self, batch: Batch) -> StepPlan:
        """Decide what follows the next step."""
        number = self.state.step + 1
        order = self.batches.order
        following = order.after(batch.position)
        ends_epoch = following.epoch > batch.position.epoch
        ends_window = order.ends_window(batch.position)
        every_steps = self.cfg.training.checkpoint_every_steps
        is_save_due = every_steps is not None and number % every_steps == 0
        is_publish_due = self.publishing is not None and self.publishing.is_due(number)
        evaluates = (
            ends_epoch and validates(self.cfg) and following.epoch % self.cfg.training.evaluate_every_epochs == 0
        )
        is_due = ends_epoch or ends_window or number == self._last_step or is_save_due or is_publish_due
        # A stop may not change what the run would have become: where copies of rows differ, it waits.
        stops = self._meter.wants_stop and self.session.engine.is_settled_after(number)
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

    def make_batches(self) -> BatchLoader:
        """Of the samples that the task gives now."""
        clustering = self.cfg.pipeline.clustering
        assembler = self.session.task.assembler
        ring = self.session.ring
        return BatchLoader(
            assembler if ring.size == 1 else ContextParallelCollator(assembler, ring.rank, ring.size),
            self.cfg.batch,
            seed=self.cfg.training.seed,
            dealer=self.balancing.dealer,
            cluster=None if clustering is None else ByKeys(clustering),
            num_micro_batches_at=self.window.schedule.at,
        )

    def _loss(
        self, batch: MicroBatch, rows: Mapping[str, torch.Tensor], index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Of the task as it is now: where data grows, it is another one."""
        return check_loss(self.cfg.task.kind, self.session.task.loss(batch, rows, index))

    @contextlib.contextmanager
    def _open_feed(self, num_batches: int | None = None) -> Iterator[LookaheadIterator]:
        """Open the feed of the next batches, at most `num_batches`. An error ends the threads that work on them."""
        left = num_batches if self._last_step is None else max(0, self._last_step - self.state.step)
        feed = LookaheadIterator(self.batches.starting_at(self.state.position), left)
        try:
            yield feed
        except BaseException as error:
            self.schedule.abandon(error)
            raise
        finally:
            feed.close()

    @property
    def ends_with_test(self) -> bool:
        """Whether the run is to be measured on the test part when its training has ended."""
        return not self.cfg.training.train_only and self.session.task.num_held_out("test") > 0

    def evaluate(self, part: Part = "test") -> Evaluation:
        """Measure on held-out data with the weights of the best validation score; written into the run folder."""
        evaluation = self.measure(part, best=True)
        self.folder.write_evaluation(evaluation, self.state.step, self.state.position.epoch)
        self._listener.evaluated(evaluation, self.state.step, self.state.position.epoch)
        self._check_folder()
        return evaluation

    def measure(self, part: Part, *, best: bool) -> Evaluation:
        """Measure with the best weights or the last ones."""
        card = self.session.dataset.card
        on_first(self._topology, lambda: check_same_data(self.folder.path, card, or_later=True))
        if self.session.task.num_held_out(part) == 0:
            check_holds_out(self.cfg, part)
            remedy = self.session.task.remedy_if_empty
            raise UserError(
                f"holds nothing in the {part} part", option="data.folder", value=self.cfg.data.folder, remedy=remedy
            )
        self.state, self.has_best = self.saving.restore_best() if best else (self.saving.restore_last(), False)
        return self.session.evaluate(part)

    def close(self) -> None:
        """Give back the memory and files of the tables and of the run; only after `train` has ended, or without it."""
        self.session.engine.close()
        self.folder.close()

    def _begin(self) -> None:
        """Continue from the newest checkpoint, or begin from another run or from step 0."""
        # Both before the config is written: they may refuse to go on with another one, or with another model.
        changes = on_first(self._topology, self._changes_since_last_start) or []
        begun: list[str] = []
        found = self.saving.find_to_go_on(lambda: self._begin_from_another(begun))
        self.folder.begin(self._given, dumps(self.session.dataset.card) + "\n", self._topology.device)
        task = self.session.task
        self.folder.write_parameters(sum(p.numel() for p in task.model.parameters()), task.tables)
        self.state = self.saving.begin(found)
        if self._beginning is not None:
            self.folder.write_beginning(self._beginning.to_plain())
        if begun:
            self._record_beginning(begun)
        elif self.state.step:
            self._record_resumption(changes)
        self._resume_choices()
        self._check_folder()
        self.publishing = self._open_publishing(
            self.cfg.publish,
            self.session,
            self.folder.identity(),
            self.state.step,
            warn=self._listener.warned,
            tell=self._listener.noted,
        )
        self.folder.reached(self.state.step, is_mark=True)
        self._listener.started(None if self._follows else self._total_steps(), self.state.step)
        if self.windows and self.state.windows_done and self.state.window_step == self.state.step:
            self._call_hooks(is_restart=True)
        self._start_watching()

    def _record_beginning(self, texts: Sequence[str]) -> None:
        """Say what was taken over from another run."""
        self.folder.forget_after(-1)  # of an earlier start that ended before its first checkpoint
        for text in texts:
            self.folder.record("event", step=self.state.step, text=text)
            self._listener.noted(text)

    def _record_resumption(self, changes: Sequence[str]) -> None:
        """Say from where the run goes on, on how many ranks, and what the end of the last start has cost."""
        step = self.state.step
        ranks = self._topology.world
        lost = self.folder.lost_after(step)
        self.folder.forget_after(step)
        self.folder.record("event", step=step, text=f"resumed from step {step}", ranks=ranks)
        if lost is not None:
            self.folder.record("event", step=step, text=str(lost), lost_steps=lost.steps, lost_s=lost.seconds)
            self._listener.noted(f"going on from step {step} on {ranks} rank{'s' if ranks > 1 else ''}: {lost}")
        for change in changes:
            self.folder.record("event", step=step, text=f"changed: {change}")
            self._listener.warned(f"changed since the run was last started: {change}")

    def _resume_choices(self) -> None:
        """What an earlier start has measured and decided, as far as it still holds."""
        known, dropped = self.balancing.resume(self.state.cost_changes, self.state.step, fitted_from=self.state.cost)
        for note in dropped:
            self.folder.record("event", step=self.state.step, text=note)
            self._listener.warned(note)
        self.state = replace(
            self.state,
            cost=self._balance.cost,
            cost_changes=known,
            window_changes=self.window.resume(self.state.window_changes, self.state.step),
            loss_variant=self._settled_variant(self.state.loss_variant),
        )

    def _take_windows(self) -> list[TimeWindow]:
        """Windows of time, where they are trained on in their order."""
        if self.cfg.batch.order == "shuffled" or self._follows:
            return []
        start_ms = moment_ms(self.cfg.windows.start, "windows.start")
        seen_by = None
        if start_ms is None and self._beginning is not None:
            start_ms = self._beginning.after_ms
            seen_by = self._beginning.run
        windows = self.session.task.windows_by_time(self.cfg.windows, start_ms or 0)
        check_any_window(windows, start_ms or 0, seen_by)
        self.session.task.take_windows(windows, None, replay_share=self.cfg.windows.replay_share)
        return windows

    def _begin_from_another(self, notes: list[str]) -> TrainState:
        """As a new run begins. notes: receives what was taken over from another run, in words."""
        if self._beginning is None:
            return TrainState()
        state, texts = self._beginning.load(self.session, self._listener.warned)
        notes += texts
        return state

    def train_window(self, window: TimeWindow, generation: int, stop: StopRequest) -> None:
        """A window of a stream, on a generation of the dataset that the session is on: predicted, trained on, saved.

        Where the run stands in the middle of it, it goes on there.
        """
        self.windows = [window]
        self.batches = self.make_batches()
        if self.state.generation != generation or self.state.position.step == 0:
            self.state = self.state.began_window(generation)
        epoch = self.state.position.epoch
        left = self.batches.order.steps_in_epoch(epoch) - self.state.position.step
        with self._open_feed(left) as feed:
            while self.state.position.epoch == epoch:
                self.train_step(feed, stop)

    def _predict_window(self) -> None:
        """Where the next batch begins a window: measure the model on it, before it has seen any of it."""
        if not self.windows or (self.state.position.epoch > 0 and not self._follows):
            return  # in later epochs it has
        number = self.windows[self.batches.order.window_of(self.state.position)].number
        if number < self.state.windows_predicted:
            return
        self._meter.flush()
        window = self.windows[0 if self._follows else number]
        step = self.state.step
        metrics = self.session.task.predict(self.session.engine, window)
        self.state = self.state.predicted(number)
        self.folder.write_window(window, metrics, step)
        self._listener.predicted(window, metrics, step)
        self.pipeline.issue(self._check_folder)
        self._start_watching()

    def _call_hooks(self, *, is_restart: bool = False) -> None:
        """Tell whoever wants to know that a window has ended; what was saved is on the disk."""
        self.saving.close()
        number = self.state.windows_done - 1
        window = self.windows[number % len(self.windows)]
        published = [] if self.publishing is None else [self.publishing.on_window]
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
                    **self.window_times,
                )
            )

    def _changes_since_last_start(self) -> list[str]:
        """What the folder's config had otherwise; a UserError where the run would become another one."""
        before = self.folder.resumed_config()
        if before is None:
            return []
        check_same_beginning(self.folder, self._beginning)
        check_same_data(self.folder.path, self.session.dataset.card, or_later=self._follows)
        return changes_since(before, self._given, self.folder.config_file)

    def _settled_variant(self, saved: str | None) -> str | None:
        """How the loss is computed, where that was left open: as the run began, or measured now. Collective."""
        settled = self.session.task.settle(self.cfg.batch, self._topology, saved)
        if settled is None:
            return None
        variant, measured_ms = settled
        if variant != saved:
            self.folder.record("event", step=self.state.step, text=f"loss variant: {variant}, of {measured_ms} ms")
        return variant

    def _validate(self) -> None:
        self._meter.flush()
        evaluation = self.session.evaluate("valid")
        if self.state.best_score is None and math.isnan(evaluation.score):
            self._listener.warned(
                f"{evaluation.headline} cannot be told on the validation part (events of both labels are needed): no "
                "epoch is better than another, and the last weights are taken"
            )
        self.state = self.state.evaluated(evaluation.score)
        self.folder.write_evaluation(evaluation, self.state.step, self.state.position.epoch)
        self._listener.evaluated(evaluation, self.state.step, self.state.position.epoch)
        self.pipeline.issue(self._check_folder)
        if self.state.best_step == self.state.step:
            self.saving.mark_best()
        self._start_watching()  # the time of an evaluation is not that of steps

    def _save(self) -> None:
        self._meter.flush()
        self.folder.reached(self.state.step, is_mark=True)
        self.saving.save(self.state)

    def _publish(self) -> None:
        self._meter.flush()  # what is not finite is no version
        if self.publishing is not None:
            with self.session.dense.averaged():
                self.publishing.publish(self.session, self.state.step)

    def _end(self) -> None:
        """Everything is written; what the run has come to is published."""
        self.saving.close()
        if self.publishing is not None:
            with self.session.dense.averaged():
                self.publishing.publish(self.session, self.state.step)
            self.publishing.close()

    def _report(self) -> None:
        spans = self.tracer.take()
        self._meter.flush()  # the loss of this very step; spans are taken when the device is done, so it is there
        epoch = self.state.position.epoch
        loss = self._meter.loss
        values = {"loss": loss, "learning_rate": self._rates().dense, **self._meter.speeds(), "parts": parts_ms(spans)}
        values["tables"] = self.session.engine.store_statistics()  # of this rank's shards
        made, seconds = self.batches.making.take()
        if made:  # as if no other rank were slower: what all ranks' threads could make together
            values["readable_per_s"] = made / seconds * self.cfg.batch.workers * self._topology.world
        evenness = self.pipeline.issue(lambda: self.balancing.report(spans, self.state.step))
        values |= evenness
        self.folder.record("step", step=self.state.step, epoch=epoch, **values)
        self._listener.stepped(self.state.step, epoch, values)
        self._name_slow_rank(evenness.get("slow_rank"), evenness.get("slow_factor", 0.0))
        if self.state.step <= TRACED_STEPS:
            self.folder.write_trace(self.pipeline.issue(lambda: spans_of_ranks(self._topology, spans)))
        self._decide(spans)
        self.pipeline.issue(self._check_folder)

    def _name_slow_rank(self, rank: int | None, factor: float) -> None:
        if self._slow_rank.is_news(rank):
            text = f"rank {rank} takes {factor:.1f} times as long as the others for the same number of tokens"
            self.folder.record("event", step=self.state.step, text=text)
            self._listener.warned(text)

    def _check_folder(self) -> None:
        """A UserError on every rank where the first could not write. Collective."""
        on_first(self._topology, self.folder.check)

    def _decide(self, spans: Sequence[Span]) -> None:
        """What measured times suggest: one value for all ranks, logged, saved, and in force some batches later."""
        step = self.state.step
        position = self.state.position
        after = self.batches.order.after
        before = self.state.cost_changes[-1].tuning if self.state.cost_changes else self._balance.tuning
        cost = self.balancing.decide(step, position, after)
        if cost is not None:
            self.state = replace(self.state, cost_changes=(*self.state.cost_changes, cost))
            what = "cost of a sample fitted" if cost.tuning == before else "shares of ranks tuned"
            self.folder.record("event", step=step, text=f"{what}: {to_plain(cost)}")
        window = self.pipeline.issue(lambda: self.window.decide(spans, step, position, after))
        if window is not None:
            self.state = replace(self.state, window_changes=(*self.state.window_changes, window))
            self.folder.record("event", step=step, text=f"micro-batches: {to_plain(window)}")

    def _start_watching(self) -> None:
        self._meter.start()
        self.balancing.start()

    def _rates(self) -> LearningRates:
        return self.cfg.optimizer.rates(self.state.step + 1)

    def _is_finished(self) -> bool:
        return bool(self.state.ends(self.cfg.training))

    def _tell_if_finished(self) -> None:
        """Of a run that is started again: what would be measured is what was measured before."""
        more = [f"--training.{name} above {reached}" for name, reached in self.state.ends(self.cfg.training).items()]
        if more:
            after = f"after step {self.state.step}"
            self._listener.noted(f"nothing is left to train {after}: to train on, give {' and '.join(more)}")

    @property
    def _last_step(self) -> int | None:
        """The step after which the run ends, where it is told one."""
        last = self.cfg.training.max_steps
        return None if last is None else self.state.first_step + last

    def _total_steps(self) -> int:
        cfg = self.cfg.training
        by_epochs = self.batches.order.steps_in_epoch(0) * cfg.epochs
        own = min(by_epochs, cfg.max_steps) if cfg.max_steps is not None else by_epochs
        return self.state.first_step + own


def _config_of_stream(cfg: RunConfig) -> RunConfig:
    """Return the config of a run on a stream, which has no end and no epochs: windows are measured as they come."""
    return replace(cfg, training=replace(cfg.training, evaluate_every_epochs=0, max_steps=None, patience=None))


def _check_batches(cfg: RunConfig, session: Session, *, follows: bool) -> None:
    """Raise a UserError if the data or the task cannot be cut into batches as the config says."""
    check_can_cut(session.task.couples_samples, cfg.batch.micro_batches)
    if cfg.pipeline.window_cache:
        check_can_cache(cfg.batch.micro_batches)
    check_parts(cfg, session.task)
    check_micro_batches(cfg, None if follows else session.task.assembler.tokens)
    session.task.check_batches(cfg.batch, session.topology.world)


def _build_balancing(balance: BalanceConfig, cfg: RunConfig, topology: Topology, tracer: Tracer) -> BalanceController:
    return BalanceController(balance, made_ahead=cfg.batch.prefetch + 1, topology=topology, tracer=tracer)


def _build_pipeline(cfg: RunConfig, session: Session, loss: Loss, tracer: Tracer) -> PipelineCore:
    sharded = session.dense.sharded
    compute = compute_of(
        session.task,
        session.topology.device,
        cfg.training.precision,
        loss=loss,
        empty_pass=None if sharded is None else sharded.empty_pass,
    )
    return PipelineCore.build(compute, session.engine, session.dense, cfg.pipeline, tracer=tracer, context=session.ring)
