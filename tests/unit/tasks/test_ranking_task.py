"""Multi-task ranking learns only from what is known before an event."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from nestrec.base.config_overrides import apply_overrides
from nestrec.base.config_values import format_iso_time, parse_time_ms
from nestrec.base.errors import UserError, UserErrorGroup
from nestrec.data.batch_loader import BatchConfig
from nestrec.data.dataset import Dataset
from nestrec.data.flat_arrays import history_start
from nestrec.data.formats.format_registry import prepare
from nestrec.data.formats.log_format import LogOptions
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.samples.chunk_collator import RankingChunkCollator
from nestrec.data.samples.ranking_collator import RankingHistoryConfig, RankingInputConfig, RankingInputs
from nestrec.data.samples.split import Split, SplitConfig
from nestrec.data.samples.time_windows import TimeWindow, TrainingChunks, held_out_chunks, split_runs_into_chunks
from nestrec.data.synthetic import synthetic_logs as synthetic
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine
from nestrec.models import HSTUConfig
from nestrec.pipeline.dense.dense_optimizer import OptimizerConfig
from nestrec.tasks.metrics import user_aucs
from nestrec.tasks.ranking_task import RankingEvaluationConfig, RankingTask, RankingTaskConfig
from nestrec.tasks.task_registry import _loss_of
from nestrec.training.recipes import recipe
from nestrec.training.run_config import DataConfig, RunConfig, TrainingConfig
from nestrec.training.trainer import Trainer

ACTIONS = ("click", "like", "long_view")
CUT_MS = (synthetic.START_MS + synthetic.SPAN_MS // 2, synthetic.START_MS + synthetic.SPAN_MS * 5 // 8)


def make_log(folder: Path, *, shuffled: bool) -> Path:
    """Prepares a synthetic log; `shuffled` permutes the actions over all events."""
    raw = folder / "log.csv"
    output = folder / f"shuffled-{shuffled}"
    synthetic.write_csv(synthetic.preset("tiny", num_users=1200), raw)
    table = pyarrow.csv.read_csv(raw)
    if shuffled:
        order = np.random.default_rng(0).permutation(table.num_rows)
        for name in ACTIONS:
            table = table.set_column(table.column_names.index(name), name, pa.array(table[name].to_numpy()[order]))
    table = table.append_column("play_ms", table["click"])
    pyarrow.csv.write_csv(table, raw)
    columns = LogColumns(time="time_ms", time_unit="ms", actions={a: a for a in ACTIONS}, rating="play_ms")
    prepare("log", raw, output, options=LogOptions(log=columns))
    return output


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return make_log(tmp_path_factory.mktemp("log"), shuffled=False)


def ranking_run(data: Path) -> RunConfig:
    return RunConfig(
        name="ranking",
        task=RankingTaskConfig(
            encoder=HSTUConfig(dim=16, head_dim=8, num_heads=2, num_layers=1, max_length=40, dropout=0.1),
            history=RankingHistoryConfig(max_events=20),
            inputs=RankingInputConfig(labels=("click", "like")),
            split=SplitConfig(valid_from=format_iso_time(CUT_MS[0]), test_from=format_iso_time(CUT_MS[1])),
            evaluation=RankingEvaluationConfig(baselines=("logistic",), listwise_events=0),
        ),
        data=DataConfig(folder=str(data)),
        batch=BatchConfig(batch_size=64),
        optimizer=OptimizerConfig(learning_rate=5e-3),
        training=TrainingConfig(epochs=10, eval_every_epochs=0, device="cpu"),
    )


def trained_auc(data: Path, run: Path) -> tuple[float, float, float]:
    trainer = Trainer(ranking_run(data), run, Topology.single())
    trainer.train()
    interval = trainer.evaluate("test").metrics["model"]["auc/click"]
    return interval.mean, interval.low, interval.high


@pytest.mark.slow
def test_ranking_learns_true_labels_but_not_shuffled_ones(log, tmp_path):
    """Randomly permuted labels cannot be predicted, so an AUC above 0.5 would be a leak."""
    auc, low, _ = trained_auc(log, tmp_path / "true")
    assert low > 0.55, auc
    auc, low, high = trained_auc(make_log(tmp_path, shuffled=True), tmp_path / "shuffled-run")
    assert low < 0.5 < high, (auc, low, high)


def test_ranking_rejects_outcomes_as_event_features(log, tmp_path):
    dataset = Dataset.open(log)
    inputs = RankingInputConfig(labels=("click",), event_features=("rating",))
    with pytest.raises(UserError, match="known before the user reacts"):
        RankingInputs(dataset, inputs, seed=0)


def test_ranking_unknown_label_gets_a_suggestion(log, tmp_path):
    dataset = Dataset.open(log)
    with pytest.raises(UserError, match="Did you mean 'click'"):
        RankingInputs(dataset, RankingInputConfig(labels=("clikc",)), seed=0)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("task.split.valid_from", {"split": SplitConfig(valid_from="2030-01-02", test_from="2030-01-01")}),
        ("task.evaluation.baseline_category", {"evaluation": RankingEvaluationConfig(baseline_category="tab")}),
        ("task.inputs.labels", {"inputs": RankingInputConfig(labels=())}),
    ],
    ids=["times out of order", "no such category", "nothing to predict"],
)
def test_ranking_invalid_options_are_rejected_at_the_start(log, tmp_path, field, changes):
    cfg = ranking_run(log)
    with pytest.raises(UserError) as raised:
        RankingTask(replace(cfg.task, **changes), Dataset.open(cfg.data.folder), seed=0, dtype="float32")
    assert raised.value.option == field


def test_ranking_reports_all_missing_columns_at_once(log, tmp_path):
    cfg = apply_overrides(recipe("kuairand_ranking"), {"data.folder": str(log)})
    with pytest.raises(UserErrorGroup) as raised:
        RankingTask(
            replace(cfg.task, inputs=replace(cfg.task.inputs, labels=("clik", "buy"))),
            Dataset.open(cfg.data.folder),
            seed=0,
            dtype="float32",
        )
    fields = [error.option for error in raised.value.errors]
    assert fields.count("task.inputs.labels") == 2
    assert {f"task.inputs.{owner}_features" for owner in ("event", "user", "item")} < set(fields)
    assert "task.evaluation.baseline_category" in fields


def test_split_dates_are_parsed_as_iso_times():
    assert parse_time_ms("2026-11-01", "x") == 1_793_491_200_000
    assert parse_time_ms("2026-11-01T02:00+02:00", "x") == 1_793_491_200_000
    assert parse_time_ms(format_iso_time(1_793_491_200_123), "x") == 1_793_491_200_123
    with pytest.raises(UserErrorGroup) as raised:
        apply_overrides(recipe("ranking"), {"task.split.valid_from": "1793491200000", "task.split.test_from": "May"})
    assert [e.option for e in raised.value.errors] == ["task.split.valid_from", "task.split.test_from"]


def test_split_without_dates_holds_out_the_last_events():
    times = np.arange(1000)[::-1] * 10
    assert SplitConfig().cuts_ms(times) == (8000, 9000)
    assert SplitConfig(test_fraction=0.25, valid_fraction=0.05).cuts_ms(times) == (7000, 7500)
    last = int(times.max())
    assert SplitConfig(test_fraction=0, valid_fraction=0).cuts_ms(times) == (last + 1, last + 1), (
        "a fraction of 0 holds out no events"
    )
    assert SplitConfig(test_from=format_iso_time(5000)).cuts_ms(times) == (4000, 5000)


def test_ranking_recipe_trains_on_a_custom_log(log, tmp_path):
    small = {
        "task.encoder.dim": "8",
        "task.encoder.head_dim": "4",
        "task.history.max_events": "8",
        "task.encoder.max_length": "16",
        "training.epochs": "1",
        "training.device": "cpu",
    }
    cfg = apply_overrides(recipe("ranking"), {"data.folder": str(log), **small})
    trainer = Trainer(cfg, tmp_path / "run", Topology.single())
    trainer.train()
    evaluation = trainer.evaluate("test")
    assert {"model", "logistic"} <= set(evaluation.metrics)
    assert trainer.session.task.num_held_out("test") > 0


def test_held_out_chunks_score_each_event_once_after_its_history():
    generator = np.random.default_rng(0)
    train = generator.integers(0, 30, 200)
    valid = train + generator.integers(0, 40, 200)
    split = Split(train, valid, valid + 3)
    windows = held_out_chunks(split, "valid", max_events=16, slide_events=2)
    scored = [(u, e) for u, _, end, start in windows for e in range(start, end)]
    assert sorted(scored) == [(u, e) for u in range(200) for e in range(train[u], valid[u])]
    assert (windows[:, 2] - windows[:, 1] <= 16).all()
    assert (windows[:, 1] >= 0).all()
    for _, first, end, start in windows.tolist():
        assert {history_start(event, 15, 2) for event in range(start, end)} == {first}


def test_ranking_train_events_all_trains_on_long_histories(log):
    cfg = ranking_run(log).task
    inputs = replace(cfg.inputs, train_events="all")
    history = replace(cfg.history, max_events=4)
    task = RankingTask(
        replace(cfg, inputs=inputs, history=history, encoder=replace(cfg.encoder, max_length=8)),
        Dataset.open(log),
        seed=0,
        dtype="float32",
    )
    samples = np.arange(len(task.collator.tokens))
    batch = task.collator.collate(samples, task.collator.read(samples), epoch=0)
    train_end = task._split.train_end
    assert train_end.max() > 8
    assert batch.tensors["scored"].sum() == train_end.sum() == task.collator.weights.sum()
    assert batch.max_length == 8
    assert task.collator.window_bounds is None


def test_listwise_scores_ignore_reactions_to_held_out_events(log, tmp_path):
    cfg = ranking_run(log)
    trainer = Trainer(
        replace(cfg, task=replace(cfg.task, evaluation=replace(cfg.task.evaluation, listwise_events=300))),
        tmp_path / "run",
        Topology.single(),
    )
    task = trainer.session.task
    engine = trainer.session.engine
    chunks = held_out_chunks(task._split, "test", 20, task._slide_events)
    sequential, _, users = task._scores(engine, chunks)
    ends = task._split.valid_end, task._split.test_end
    scored = task._score_listwise(engine, np.stack([np.arange(len(ends[0])), *ends], axis=1), 300)
    assert 200 < len(scored.events) <= 300
    sequential, users, listwise = sequential[scored.events], users[scored.events], scored.logits
    is_first = np.append(True, users[1:] != users[:-1])
    assert np.allclose(listwise[is_first], sequential[is_first], atol=1e-6)
    assert not np.allclose(listwise[~is_first], sequential[~is_first], atol=1e-6)
    user = users[~is_first & (task._split.test_end <= 20)[users]][0]
    rows = task._inputs.read(np.array([user]))
    first, at = task._split.valid_end[[user]], task._split.valid_end[[user]] + 1
    events = [*range(first[0]), at[0]]
    batch = task._inputs.collate_queries(rows, np.array([0]), first, at)
    assert batch.keys["item"].tolist() == rows.lists["item_ids"][0][events].tolist()
    assert batch.tensors["action"].tolist() == rows.lists["actions"][0][events].tolist()


def test_listwise_gauc_is_reported_per_time_window(log, tmp_path):
    cfg = ranking_run(log)
    evaluation = replace(cfg.task.evaluation, listwise_window_events=100)
    cfg = replace(
        cfg, task=replace(cfg.task, evaluation=evaluation, inputs=replace(cfg.task.inputs, labels=("click",)))
    )
    trainer = Trainer(cfg, tmp_path / "run", Topology.single())
    task = trainer.session.task
    engine = trainer.session.engine
    users = task._split.users_with("test")[:150]
    runs = np.stack([users, task._split.valid_end[users], task._split.test_end[users]], axis=1)
    metrics = task.evaluate_window(engine, TimeWindow(number=0, from_ms=0, to_ms=0, runs=runs))
    _, label_EK, user_E = task._scores(engine, split_runs_into_chunks(runs, 20))
    listed = task._score_listwise(engine, runs, 100)
    aucs, weights = user_aucs(label_EK[listed.events, 0], listed.logits[:, 0], user_E[listed.events])
    assert len(aucs) > 3
    assert metrics["gauc_at_once/click"].mean == pytest.approx(aucs @ weights / weights.sum())
    assert metrics["gauc_at_once/click"].mean != pytest.approx(metrics["gauc/click"].mean)


@pytest.mark.slow
def test_kuairand_ranking_beats_logistic_baseline(data_folder, tmp_path):
    data = tmp_path / "kuairand"
    prepare("kuairand", data_folder / "kuairand-pure", data)
    cfg = apply_overrides(recipe("kuairand_ranking"), {"data.folder": str(data)})
    trainer = Trainer(cfg, tmp_path / "run", Topology.single())
    trainer.train()
    metrics = trainer.evaluate("test").metrics
    assert metrics["model"]["auc/click"].low > metrics["logistic"]["auc/click"].mean


def test_criteo_ctr_beats_the_base_rate(data_folder, tmp_path):
    prepare("criteo", data_folder / "criteo-sample" / "criteo_first_7000.txt.gz", tmp_path / "criteo")
    cfg = apply_overrides(recipe("criteo_dlrm"), {"data.folder": str(tmp_path / "criteo"), "training.device": "cpu"})
    trainer = Trainer(cfg, tmp_path / "run", Topology.single())
    trainer.train()
    metrics = trainer.evaluate("test").metrics
    assert metrics["model"]["log_loss"].mean < metrics["base rate"]["log_loss"].mean


def test_ranking_history_events_add_nothing_to_the_loss(log):
    """The loss of a chunk of six scored events equals the sum over six chunks that score only their last event."""
    task = RankingTask(ranking_run(log).task, Dataset.open(log), seed=0, dtype="float32")
    task.model.eval()
    engine = EmbeddingEngine(task.tables, Topology.single())
    user = int(np.flatnonzero(task._split.train_end >= 6)[0])

    def loss(*chunks: tuple[int, int]) -> float:
        rows = np.array([(user, 0, end, scored) for end, scored in chunks])
        task.collator = RankingChunkCollator(task._inputs, TrainingChunks(rows, None), 0)
        return _loss_of("ranking", task, engine, np.arange(len(rows)))

    alone = [loss((end, end - 1)) for end in range(1, 7)]
    assert loss((6, 0)) == pytest.approx(sum(alone))
    assert loss((6, 4)) == pytest.approx(sum(alone[4:]))
    assert loss(*((end, end - 1) for end in range(1, 7))) == pytest.approx(sum(alone))
