"""`nestrec describe`: contents of a dataset, and columns that may leak the outcome."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestrec.cli.data_output import show_dataset
from nestrec.data.dataset import Dataset
from nestrec.data.formats.format_registry import prepare
from nestrec.report.dataset_description import Description, describe

NUM_EVENTS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random clicks: `screen` depends on the click, `dwell` is set only for clicks, `page` is independent."""
    root = tmp_path_factory.mktemp("described")
    draw = np.random.default_rng(0)
    clicked = draw.integers(0, 2, NUM_EVENTS)
    item = draw.integers(0, 60, NUM_EVENTS)
    log = {
        "user": np.arange(NUM_EVENTS) % 20,
        "item": item,
        "at": np.arange(NUM_EVENTS),
        "clicked": clicked,
        "screen": np.where(clicked == 1, "product", "list"),
        "dwell": np.where(clicked == 1, draw.random(NUM_EVENTS), np.nan),
        "page": draw.integers(0, 3, NUM_EVENTS).astype(str),
        "watched": clicked * 3.0,
        "never": [None] * NUM_EVENTS,
    }
    pq.write_table(pa.table({**log, "never": pa.array(log["never"], pa.string())}), root / "log.parquet")
    counts = np.bincount(item, minlength=60)
    items = {"item": np.arange(60), "views": counts * 10.0, "price": draw.random(60), "tags": [["a", "b"], []] * 30}
    pq.write_table(pa.table(items), root / "items.parquet")
    prepare(
        "log",
        root / "log.parquet",
        root / "data",
        items=str(root / "items.parquet"),
        item_columns={"numbers": ("views", "price"), "transforms": {"views": "log"}},
        log={
            "time": "at",
            "actions": {"click": "clicked"},
            "categories": ("screen", "page", "never"),
            "numbers": ("dwell",),
            "transforms": {"dwell": "standard"},
            "outcome_features": {"watch": "watched"},
        },
    )
    return root / "data"


@pytest.fixture(scope="module")
def description(folder: Path) -> Description:
    return describe(Dataset.open(folder))


def test_describe_warns_only_of_leaking_columns(description: Description) -> None:
    warned_columns = {warning.split()[0] for warning in description.warnings}
    assert warned_columns == {"event_screen", "event_dwell", "item_views", "event_never"}
    assert any("'click'" in w and "--log.outcome_features" in w for w in description.warnings)


def test_describe_reports_equal_times(tmp_path: Path) -> None:
    rows = "".join(f"{user},{index},{index // 2 if user else index}\n" for user in range(3) for index in range(6))
    (tmp_path / "log.csv").write_text("user,item,day\n" + rows)
    prepare("log", tmp_path / "log.csv", tmp_path / "out", log={"time": "day"})
    [warning] = describe(Dataset.open(tmp_path / "out")).warnings
    assert warning.startswith("40% of events have the same time as the user's previous event")  # 6 of 15


def test_describe_reports_coverage_cardinality_and_examples(description: Description) -> None:
    facts = {f.feature.column: f for f in description.features}
    assert facts["item_tags"].coverage == 0.5
    assert (facts["item_tags"].distinct, facts["item_tags"].examples) == (2, ("a", "b"))
    assert (facts["event_page"].coverage, facts["event_page"].distinct) == (1.0, 3)
    assert facts["event_dwell"].coverage == pytest.approx(description.actions["click"])
    assert facts["event_never"].coverage == 0


def test_describe_warns_of_columns_known_after_event(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_dataset(folder)
    printed = capsys.readouterr().out
    assert "event_watch is known only after its event" in printed
    assert "WARNING: event_screen nearly determines 'click'" in printed
    assert "feature transforms were fitted on" in printed
