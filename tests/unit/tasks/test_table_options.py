"""Tables by name: what a run says of them is what it gets, and what cannot be is refused by its name."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.csv
import pytest
import torch

import nestrec
from nestrec.base.config_overrides import with_overrides
from nestrec.base.errors import UserError, UserErrorGroup
from nestrec.data.formats.format_registry import prepare
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.synthetic import synthetic_logs as synthetic
from nestrec.distributed import Topology
from nestrec.embedding import TableConfig
from nestrec.embedding.hashing import hashed_rows
from nestrec.exporters.servable_writer import export_run
from nestrec.serving.model.model_adapter import make_form
from nestrec.serving.model.servable import Servable
from nestrec.tasks.table_overrides import TableOverrides, chosen_tables, tables_with
from nestrec.training.recipes import recipe
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of, make_datasets

TABLES = [
    TableConfig(name="items", dim=8, num_rows=61, features=("item",)),
    TableConfig(name="item_brand", dim=8, num_rows=9),
    TableConfig(name="item_tags", dim=8, num_rows=12),
    TableConfig(name="event_brand", dim=8, num_rows=7),
]


def chosen(**options):
    given = {name.replace("every", "*"): TableOverrides(**values) for name, values in options.items()}
    return chosen_tables(TABLES, given, bags={"item_tags"})


def by_name(found):
    return {table.name: table for table in found.tables}


def test_what_is_said_of_all_yields_to_what_is_said_of_one():
    found = by_name(chosen(every={"dtype": "bfloat16", "dim": 4}, tags={"dtype": "float16"}, items={"dim": 32}))
    assert [t.dtype for t in found.values()] == ["bfloat16", "bfloat16", "float16", "bfloat16"]
    assert [t.dim for t in found.values()] == [32, 4, 4, 4]


def test_store_optimizer_and_ids_of_one_table_leave_the_others_alone():
    tags = {"ids": "dynamic", "admission_count": 2, "eviction": "lru", "max_rows": 5, "store": "dram"}
    found = by_name(chosen(tags=tags | {"optimizer": "adagrad"}, items={"ids": "hashed", "rows": 10}))
    assert found["item_tags"].num_rows is None
    store = found["item_tags"].store
    assert (store.kind, store.admission_count, store.eviction, store.max_rows) == ("dram", 2, "lru", 5)
    assert found["item_tags"].optimizer.kind == "adagrad"
    assert (found["items"].num_rows, found["items"].is_hashed) == (10, True)
    assert found["event_brand"] == TABLES[3]


def test_two_features_may_read_one_table():
    found = chosen(event_brand={"share": "item_brand"})
    assert by_name(found)["item_brand"].features == ("item_brand", "event_brand")
    assert found.num_ids == {"items": 61, "item_brand": 9, "item_tags": 12}
    assert found.table_of["event_brand"].name == "item_brand"


def test_bags_are_means_unless_something_else_is_said():
    assert chosen().pooling == {"item_tags": "mean"}
    assert chosen(tags={"pooling": "sum"}).pooling == {"item_tags": "sum"}


@pytest.mark.parametrize(
    ("options", "field", "told"),
    [
        ({"tgs": {"dim": 4}}, "tables.tgs", "did you mean 'tags'.*items, item_brand, item_tags, event_brand"),
        ({"brand": {"dim": 4}}, "tables.brand", "event_brand or item_brand"),
        ({"items": {"pooling": "sum"}}, "tables.items.pooling", "one id"),
        ({"items": {"rows": 5}}, "tables.items.rows", "--tables.items.ids hashed"),
        ({"items": {"ids": "hashed"}}, "tables.items.ids", "--tables.items.rows"),
        ({"tags": {"max_rows": 5}}, "tables.tags.max_rows", "--tables.tags.ids dynamic"),
        ({"tags": {"ids": "dynamic", "eviction": "lfu"}}, "tables.tags.eviction", "--tables.tags.max_rows"),
        ({"event_brand": {"share": "items", "dim": 4}}, "tables.event_brand.dim", "tables.items"),
        ({"event_brand": {"share": "event_brand"}}, "tables.event_brand.share", "rows of its own"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(options, field, told):
    with pytest.raises((UserError, UserErrorGroup)) as refused:
        chosen(**options)
    [error] = getattr(refused.value, "errors", [refused.value])
    assert error.option == field
    assert re.search(told, f"{error.problem} {error.remedy}"), error.remedy


def test_hashed_keys_stay_in_range_and_none_shares_the_row_of_the_unknown():
    rows = hashed_rows(np.array([[0, 1, 2**62], [-5, 7, 0]]), 4)
    assert rows.shape == (2, 3)
    assert (rows == 0).tolist() == [[True, False, False], [False, False, True]]
    assert 0 < rows[rows > 0].min() <= rows.max() < 4
    assert len(np.unique(hashed_rows(np.arange(1, 1000), 50))) == 49


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    make_datasets(folder, num_topics=4)
    return folder


RETRIEVAL = {"tables.items.dim": "12", "tables.items.ids": "dynamic", "tables.items.optimizer": "rowwise_adagrad"}
RANKING = {
    "tables.*.dtype": "bfloat16",
    "tables.items.dim": "4",
    "tables.items.store": "dram",
    "tables.topic.dim": "6",
    "tables.topic.ids": "hashed",
    "tables.topic.rows": "3",
}
ROWS = {"tables.categories.dim": "6", "tables.categories.dtype": "float16"}


@pytest.mark.parametrize(("family", "said"), [("hstu", RETRIEVAL), ("ranking", RANKING), ("rows", ROWS)])
def test_every_task_trains_and_measures_on_tables_of_other_widths(data, tmp_path, family, said):
    cfg = config_of(family, data, {**said, "training.max_steps": "3"})
    trainer = Trainer(cfg, tmp_path / "run", Topology.single())
    trainer.train()
    widths = {name: table.dim for name, table in trainer.session.engine.tables.items()}
    assert widths[next(iter(widths))] == int(said.get("tables.items.dim", 6))
    if family != "rows":
        check_export(trainer, tmp_path, family)
    assert np.isfinite(trainer.evaluate("test").score)


def check_export(trainer: Trainer, tmp_path: Path, family: str) -> None:
    """It holds what evaluation reads of each item, in the model's width."""
    export_run(tmp_path / "run", tmp_path / "out", best=False)
    served = Servable.load(tmp_path / "out")
    task = trainer.session.task
    ids = np.arange(served.spec.num_items + 1)
    feature = "item" if family == "ranking" else "history"
    rows = trainer.session.engine.lookup_readonly({feature: ids})[feature]
    expected = task.model.to_width("items", rows).detach()
    torch.testing.assert_close(served.tables["items"].rows(torch.from_numpy(ids)), expected)
    if family == "ranking":
        whole = task.item_content(trainer.session.engine, ids)
        topic = served.tables["item_topic"].rows(served.item_columns["item_topic"])
        torch.testing.assert_close(expected + topic, whole)
    assert make_form(served).outputs


@pytest.fixture(scope="module")
def log_with_tags(tmp_path_factory) -> Path:
    """A log whose items have lists of tags, some of them empty."""
    folder = tmp_path_factory.mktemp("tags")
    synthetic.write_csv(synthetic.preset("tiny", num_users=30, num_items=40), folder / "log.csv")
    names = pyarrow.csv.read_csv(folder / "log.csv")["item"].unique().to_pylist()
    lines = [f"{name},{'|'.join(f't{(int(name) + k) % 7}' for k in range(int(name) % 4))}" for name in names]
    (folder / "items.csv").write_text("item,tags\n" + "\n".join(lines) + "\n")
    columns = LogColumns(time="time_ms", time_unit="ms", actions={a: a for a in ("click", "like")})
    tags = {"lists": ("tags",), "list_separator": "|"}
    prepare("log", folder / "log.csv", folder / "data", log=columns, items=str(folder / "items.csv"), item_columns=tags)
    return folder / "data"


def test_lists_of_items_are_pooled_in_training_and_served_as_they_were_trained(log_with_tags, tmp_path):
    small = {"dim": "8", "head_dim": "4", "max_length": "16"}
    said = {f"task.encoder.{name}": value for name, value in small.items()}
    said |= {"task.inputs.max_events": "8", "task.inputs.item_features": "tags", "data.folder": str(log_with_tags)}
    said |= {"tables.tags.pooling": "sum", "tables.tags.dim": "4", "training.max_steps": "3", "training.device": "cpu"}
    trainer = Trainer(with_overrides(recipe("ranking"), said), tmp_path / "run", Topology.single())
    trainer.train()
    export_run(tmp_path / "run", tmp_path / "out", best=False)
    task = trainer.session.task
    engine = trainer.session.engine
    user = np.array([0])
    rows = task._inputs.read(user)
    length = min(6, len(rows.lists["item_ids"][0]))
    batch = task._inputs.slices(rows, np.array([0]), np.array([length]), epoch=0)
    offline = task._logits(engine, batch)[-1]
    event = {name: rows.lists[name][0][:length] for name in ("item_ids", "timestamps_ms", "actions")}
    keys = trainer.session.dataset.items()["item_key"].to_pylist()
    named = [keys[i - 1] for i in event["item_ids"]]
    bits = trainer.session.dataset.card.action_bits
    actions = [[name for name, bit in bits.items() if mask & bit] for mask in event["actions"][:-1]]
    history = {"items": named[:-1], "times_ms": event["timestamps_ms"][:-1], "actions": actions}
    history["now_ms"] = int(event["timestamps_ms"][-1])
    served = nestrec.load(tmp_path / "out").rank(history, named[-1:])
    np.testing.assert_allclose([scores[0] for scores in served.scores.values()], offline, rtol=1e-4, atol=1e-5)
    spread = task.item_content(engine, np.arange(1, 5)) - task.model.to_width(
        "items", engine.lookup_readonly({"item": np.arange(1, 5)})["item"]
    )
    assert spread.abs().sum() > 0, "tags say nothing"


def test_placement_of_all_tables_skips_those_that_cannot_have_it():
    tags = {"ids": "dynamic", "eviction": "lru", "max_rows": 5}
    found = by_name(chosen(every={"placement": "replicated"}, tags=tags, items={"store": "disk"}))
    assert {name: table.placement for name, table in found.items()} == {
        "items": "sharded", "item_brand": "replicated", "item_tags": "sharded", "event_brand": "replicated",
    }  # fmt: skip
    assert {t.placement for t in chosen(every={"placement": "sharded"}).tables} == {"sharded"}
    for others, told in (({"ids": "dynamic"}, "admitted"), ({"store": "disk"}, "disk")):
        with pytest.raises((UserError, UserErrorGroup)) as refused:
            chosen(tags={"placement": "replicated", **others})
        [error] = getattr(refused.value, "errors", [refused.value])
        assert error.option == "tables.tags.placement"
        assert told in str(error)


def test_rows_live_unused_for_the_steps_that_one_says():
    store = by_name(chosen(tags={"ids": "dynamic", "ttl_steps": 3}))["item_tags"].store
    assert (store.eviction, store.ttl_steps) == ("ttl", 3)
    with pytest.raises((UserError, UserErrorGroup), match="ttl_steps 10000"):
        chosen(tags={"ids": "dynamic", "eviction": "ttl"})


def test_tables_with_an_option_are_found_by_either_name():
    given = {"tags": TableOverrides(dim=4), "items": TableOverrides(dtype="bfloat16")}
    assert tables_with("dim", TABLES, given) == {"item_tags"}
    assert tables_with("store", TABLES, given) == set()
    assert tables_with("dtype", TABLES, {**given, "*": TableOverrides(dtype="float32")}) == {t.name for t in TABLES}


def test_time_to_live_and_room_of_a_table_are_set_together():
    store = by_name(chosen(tags={"ids": "dynamic", "ttl_steps": 3, "eviction": "lru", "max_rows": 5}))[
        "item_tags"
    ].store
    assert (store.eviction, store.ttl_steps, store.max_rows) == ("lru", 3, 5)


def test_shared_table_has_the_rows_of_both_features():
    first = TableConfig(name="first", dim=8, num_rows=9)
    second = TableConfig(name="second", dim=8, num_rows=12)
    unknown = replace(second, num_rows=None)

    def joined(table, other, **options):
        found = chosen_tables([table, other], {"second": TableOverrides(share="first")} | options)
        return found.tables[0].num_rows, found.num_ids["first"]

    hashed = {"first": TableOverrides(ids="hashed", rows=5)}
    assert joined(first, second) == (12, 12)
    assert joined(replace(first, num_rows=20), second) == (20, 20)
    assert joined(first, second, **hashed) == (5, 12), "a hashed table has the rows that it is given"
    assert joined(first, unknown) == (None, None)
    assert joined(replace(first, num_rows=None), second) == (None, None)
    assert joined(first, unknown, **hashed) == (5, None)
