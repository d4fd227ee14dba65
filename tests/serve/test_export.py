"""Exports: their scores equal those of `nestrec eval`, and a modified folder is rejected."""

import contextlib
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nestrec.base.config import dumps
from nestrec.base.config_overrides import apply_overrides, parse_overrides
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.data.samples.retrieval_collator import RetrievalQueries
from nestrec.data.samples.retrieval_inputs import CONTEXT_PREFIX
from nestrec.data.samples.time_windows import held_out_chunks
from nestrec.exporters.export_checks import check_defaults
from nestrec.exporters.servable_writer import ExportConfig, export_run
from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig
from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig
from nestrec.serving.engine.reference_runner import BatchItem, ReferenceRunner
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver
from nestrec.serving.inputs.request_schema import RecommendRequest
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.model.model_adapter import make_adapter
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec, InputDefaults
from nestrec.serving.model.serving_spec import unsupported_reason
from nestrec.tasks.ranking_task import RankingTaskConfig
from nestrec.tasks.task_registry import task_spec
from nestrec.training.recipes import RECIPES, recipe
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

SMALL = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=8, time_bias=True)
TAB = ColumnSpec(name=f"{CONTEXT_PREFIX}tab", keys=("home", "search"), num_rows=3)


def make_runner(folder):
    adapter = make_adapter(Servable.load(folder), slide_events=1)
    dtype = adapter.encoder.position.dtype
    pool = PagePool(adapter.encoder.cfg, num_pages=1, page_tokens=1, device=torch.device("cpu"), dtype=dtype)
    return ReferenceRunner(adapter, pool)


def full_scores(runner, histories, candidate_lists):
    """Return the scores of each history, computed without cached keys and values."""
    items = []
    for history, candidates in zip(histories, candidate_lists, strict=True):
        tokens = runner.adapter.tokens(history, candidates.now_ms)
        items.append(
            BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=candidates)
        )
    return runner.run(items)


def test_export_retrieval_ranks_equal_evaluation(retrieval):
    evaluation = retrieval.trainer.evaluate("test")
    dataset = retrieval.trainer.session.dataset
    task = retrieval.trainer.session.task
    runner = make_runner(retrieval.folder)
    queries = RetrievalQueries(dataset, task._split, task.cfg.history, "test", use_times=False)
    assert np.array_equal(evaluation.details["users"], queries.users)
    items, offsets = dataset.rows(queries.users).lists["item_ids"]
    times = dataset.rows(queries.users).lists["timestamps_ms"][0]
    histories = []
    candidate_lists = []
    targets = []
    for b in range(len(queries.users)):
        target = int(offsets[b]) + int(queries.target_at[b])
        past = slice(int(offsets[b]), target)
        histories.append(
            History(items=items[past], times_ms=times[past], actions=np.zeros(past.stop - past.start, np.int64))
        )
        candidate_lists.append(Candidates(items=np.arange(1, dataset.num_items + 1), now_ms=int(times[target])))
        targets.append(int(items[target]))
    expected = evaluation.details["rank/model"]
    k = max(task.cfg.evaluation.ks)
    for b, scores in enumerate(full_scores(runner, histories, candidate_lists)):
        values = scores.scores[:, 0].copy()
        values[histories[b].items[-runner.adapter.max_events :] - 1] = -np.inf
        order = np.lexsort((np.arange(len(values)), -values))
        rank = int(np.flatnonzero(order == targets[b] - 1)[0]) + 1
        assert (rank if rank <= k else 0) == expected[b]


@pytest.mark.parametrize("model", ["ranking", "half_ranking"])
def test_export_ranking_logits_equal_evaluation(request, model):
    ranking = request.getfixturevalue(model)
    evaluation = ranking.trainer.evaluate("test")
    dataset = ranking.trainer.session.dataset
    task = ranking.trainer.session.task
    runner = make_runner(ranking.folder)
    chunks = held_out_chunks(task._split, "test", task.cfg.history.max_events, task._slide_events)
    assert len(chunks) > 50
    histories = []
    candidate_lists = []
    expected = []
    num_scored = 0
    for user, first, end, scored_from in chunks[:50].tolist():
        rows = dataset.rows(np.array([user]))
        lists = {name: values for name, (values, _) in rows.lists.items()}
        for event in range(scored_from, end):
            past = slice(first, event)
            actions = lists["actions"][past].astype(np.int64)
            histories.append(
                History(items=lists["item_ids"][past], times_ms=lists["timestamps_ms"][past], actions=actions)
            )
            candidate_lists.append(
                Candidates(items=lists["item_ids"][event : event + 1], now_ms=int(lists["timestamps_ms"][event]))
            )
            expected.append(evaluation.details["logit"][num_scored])
            num_scored += 1
    assert num_scored > 200
    found = np.concatenate([scored.scores for scored in full_scores(runner, histories, candidate_lists)])
    assert np.abs(found - np.array(expected)).max() <= 1e-5


def test_export_unknown_item_vector_equals_evaluation(retrieval):
    servable = Servable.load(retrieval.folder)
    assert servable.ids_of(["no such item", servable.item_keys[4], int(servable.item_keys[7])]).tolist() == [0, 5, 8]
    seen = retrieval.trainer.session.engine.lookup_readonly({"history": np.array([0])})["history"]
    assert torch.equal(servable.tables["items"].rows(torch.tensor([0])), seen)


def test_export_contains_no_code(ranking):
    names = {path.name for path in ranking.folder.iterdir()}
    assert names
    assert all(name.endswith((".json", ".safetensors")) for name in names)


def test_export_modified_folder_is_rejected(retrieval, tmp_path):
    rng = random.Random(1)
    files = sorted(retrieval.folder.iterdir())
    for number in range(60):
        copy = tmp_path / str(number)
        copy.mkdir()
        for file in files:
            (copy / file.name).write_bytes(file.read_bytes())
        victim = copy / rng.choice(files).name
        content = bytearray(victim.read_bytes())
        damage = rng.choice(["flip", "cut", "remove", "add"])
        if damage == "flip":
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            victim.write_bytes(content)
        elif damage == "cut":
            victim.write_bytes(content[: rng.randrange(len(content))])
        elif damage == "remove":
            victim.unlink()
        else:
            (copy / "extra.py").write_text("print()")
        if damage == "flip" and victim.name == "manifest.json":
            with contextlib.suppress(CorruptFileError):  # a change of whitespace does not change the manifest's data
                assert Servable.load(copy).version == Servable.load(retrieval.folder).version
        else:
            with pytest.raises(CorruptFileError):
                Servable.load(copy)


def test_export_output_below_a_file_is_rejected(retrieval, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        export_run(retrieval.run, tmp_path / "file" / "model")


def test_export_never_overwrites(retrieval, tmp_path):
    with pytest.raises(UserError, match="already exists"):
        export_run(retrieval.run, retrieval.folder)


def test_export_rejects_model_that_cannot_be_served(tmp_path, monkeypatch):
    """The model is rejected before anything is opened: the run has neither a dataset nor a checkpoint."""
    cfg = recipe("criteo_dlrm")
    spec = replace(task_spec(recipe("criteo_dlrm").task), serving=None)
    monkeypatch.setattr("nestrec.serving.model.serving_spec.task_spec", lambda task: spec)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(dumps(cfg))
    with pytest.raises(UserError, match=r"rows.*cannot be served: its TaskSpec") as error:
        export_run(tmp_path / "run", tmp_path / "model")
    assert "docs/serving.md" in str(error.value)
    assert not (tmp_path / "model").exists()


def test_export_support_table_is_up_to_date():
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    rows = dict(re.findall(r"^\| (\w+), (?:retrieval|ranking|rows) +\| (yes|no)", text, re.MULTILINE))
    kinds = {make().task.encoder.kind: unsupported_reason(make().task) is None for make in RECIPES.values()}
    assert {kind: rows[kind] == "yes" for kind in kinds} == kinds


def test_export_supports_every_built_in_encoder():
    for encoder in (HSTUConfig(), FuXiConfig(), SASRecConfig()):
        assert unsupported_reason(RankingTaskConfig(encoder=encoder)) is None


def test_export_defaults_are_served(ranking, tmp_path):
    key = Servable.load(ranking.folder).item_keys[3]
    defaults = InputDefaults(history=(key,), times="now", actions=("click",))
    export_run(ranking.run, tmp_path / "model", defaults=defaults)
    assert Servable.load(tmp_path / "model").spec.defaults == defaults


@pytest.mark.parametrize(
    ("kind", "defaults", "problem"),
    [
        ("retrieval", InputDefaults(actions=("click",)), r"defaults.actions.*the model does not read this input"),
        ("retrieval", InputDefaults(history=("nope",)), r"defaults.history=nope: the model does not know this item"),
        ("retrieval", InputDefaults(history=()), r"defaults.history.*the default history is empty"),
        ("retrieval", InputDefaults(features={"tab": "1"}), r"defaults.features=tab: the model does not read this"),
        ("ranking", InputDefaults(actions=("clack",)), r"defaults.actions=clack(.|\n)*Did you mean 'click'"),
        ("ranking", InputDefaults(history=("1",), times="now"), r"defaults.history(.|\n)*Add --defaults.actions"),
    ],
)
def test_export_rejects_unusable_defaults(request, kind, defaults, problem):
    with pytest.raises(UserError, match=problem):
        check_defaults(defaults, Servable.load(request.getfixturevalue(kind).folder))


def test_export_with_invalid_default_writes_nothing(retrieval, tmp_path):
    with pytest.raises(UserError, match=r"defaults.history=nope: the model does not know this item"):
        export_run(retrieval.run, tmp_path / "model", defaults=InputDefaults(history=("nope",)))
    assert list(tmp_path.iterdir()) == []


def test_export_rejects_defaults_the_model_does_not_read():
    servable = random_ranking(HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=8), num_items=5)
    check_defaults(InputDefaults(features={"tab": "home"}), servable)
    check_defaults(InputDefaults(features={"tab": None}), servable)
    with pytest.raises(UserError, match=r"defaults.features.tab=hme(.|\n)*Did you mean 'home'"):
        check_defaults(InputDefaults(features={"tab": "hme"}), servable)
    with pytest.raises(UserError, match=r"defaults.times=now: the model does not read this input"):
        check_defaults(InputDefaults(times="now"), servable)


def defaults_of_remedy(remedy):
    """Return the defaults named in a remedy, parsed as `nestrec export` parses them."""
    words = shlex.split(remedy.replace("ITEM,ITEM", "1,2").partition(", which")[0])
    start = next(i for i, word in enumerate(words) if word.startswith("--defaults."))
    return apply_overrides(ExportConfig(), parse_overrides(words[start:])).defaults


@pytest.mark.parametrize(
    ("columns", "defaults"),
    [((), {}), ((TAB,), {}), ((TAB,), {"tab": "home"})],
    ids=["plain", "context", "context with a default"],
)
def test_new_user_error_shows_complete_export_command(columns, defaults):
    plain = random_retrieval(SMALL, num_items=5)
    spec = replace(plain.spec, columns=columns, defaults=InputDefaults(features=defaults))
    servable = replace(plain, spec=spec)
    resolver = RequestResolver(servable, LimitsConfig(), RequestNotes())
    with pytest.raises(BadRequestError) as error:
        resolver.user(RecommendRequest(user="stranger"))
    assert "nestrec export RUN OUT --defaults.history ITEM,ITEM --defaults.times now" in error.value.remedy
    named = defaults_of_remedy(error.value.remedy)
    check_defaults(named, servable)
    assert named.features == ({"tab": defaults.get("tab")} if columns else {})


def test_default_history_error_names_missing_defaults():
    servable = random_ranking(SMALL, num_items=5)
    with pytest.raises(UserError) as error:
        check_defaults(InputDefaults(history=("1",)), servable)
    assert error.value.remedy.startswith("add --defaults.times now --defaults.actions ")
    check_defaults(replace(defaults_of_remedy(error.value.remedy), history=("1",)), servable)
