"""Formats and sources of other packages: what they give is looked at where it comes in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from nestrec.base.errors import UserError
from nestrec.data.formats.format_registry import FORMATS, prepare
from nestrec.data.formats.format_spec import FormatSpec, log_format
from nestrec.data.prepare.event_parser import EventColumns
from nestrec.data.prepare.log_source import LogSource
from nestrec.data.prepare.prepare_options import LogColumns, PrepareOptions
from nestrec.data.prepare.raw_rows import RawBatch
from nestrec.data.streaming.stream_source import SOURCES, StreamRows, StreamSource, StreamSourceSpec, open_source

USERS, ITEMS = pa.array(["a", "a", "b", "b"]), pa.array(["x", "y", "x", "y"])
WHOLE = {"user": USERS, "item": ITEMS}


def prepared(monkeypatch: pytest.MonkeyPatch, output: Path, batch: Any) -> None:
    columns = EventColumns.of(LogColumns())
    source = LogSource("mine", "mine", columns, lambda: iter([(batch, 1.0) if isinstance(batch, RawBatch) else batch]))
    monkeypatch.setitem(FORMATS._built_in, "mine", log_format("mine", PrepareOptions, lambda path, options: source))
    monkeypatch.delitem(FORMATS._loaded, "mine", raising=False)
    prepare("mine", output, output / "data")


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (RawBatch("f", np.arange(4), {"user": USERS}), "is no column of f"),
        (RawBatch("f", np.arange(5), WHOLE), "column 'user' of f has 4 values for 5 lines"),
        (RawBatch("f", np.arange(4), {**WHOLE, "user": ["a"] * 4}), "column 'user' of f is a list"),  # type: ignore[dict-item]
        ("no batch", "its batches give str"),
    ],
)
def test_a_format_whose_batches_are_not_as_it_announced_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, batch: Any, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        prepared(monkeypatch, tmp_path, batch)
    assert not (tmp_path / "data").exists()
    prepared(monkeypatch, tmp_path, RawBatch("f", np.arange(4), WHOLE))


def test_a_format_that_gives_no_card_or_no_source_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(FORMATS._built_in, "cardless", FormatSpec("none", PrepareOptions, lambda i, o, p, q: None))  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="cardless=prepare: its `prepare` gives None and no card"):
        prepare("cardless", tmp_path, tmp_path / "data")
    monkeypatch.setitem(FORMATS._built_in, "empty", log_format("an empty one", PrepareOptions, lambda path, options: 3))  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="'an empty one': its `open` gives 3"):
        prepare("empty", tmp_path, tmp_path / "data")


class Mistaken(StreamSource):
    """Ten rows at a time; the word behind the colon says what is wrong with them."""

    def __init__(self, how: str) -> None:
        self.how = how

    def lag(self, position: Any) -> dict[str, float]:
        return {}

    def read(self, position: Any, max_rows: int) -> Any:
        at = position.get("row", 0)
        num = 0 if self.how == "empty" else 11 if self.how == "many" else 10
        behind: Any = {"back": 10 if at >= 20 else at + 10, "stay": at, "empty": at}.get(self.how, at + 10)
        place: Any = {"row": np.int64(behind) if self.how == "numpy" else behind}
        columns = {"user": pa.array(["u"] * num), "item": pa.array(["i"] * (1 if self.how == "short" else num))}
        if self.how == "columns":
            del columns["item"]
        rows = StreamRows(RawBatch("f", np.arange(num), columns), 7 if self.how == "number" else place, 1.0)  # type: ignore[arg-type]
        return (rows, place) if self.how == "tuple" else rows


@pytest.fixture
def mistaken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    spec = StreamSourceSpec(
        "s", lambda a: a.startswith("wrong:"), lambda address, *_: Mistaken(address.partition(":")[2])
    )
    monkeypatch.setitem(SOURCES._loaded, "wrong", spec)
    monkeypatch.setitem(SOURCES._foreign, "wrong", None)
    monkeypatch.setattr(SOURCES, "package_of", lambda name: "theirs")
    return iter(())


def read_through(source: StreamSource, reads: int) -> Any:
    position: Any = {}
    for _ in range(reads):
        rows = source.read(position, 10)
        assert rows is not None
        position = rows.position
    return position


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("back", 'the position {"row": 10} behind its rows, which it was asked from before'),
        ("stay", 'the position {"row": 0} behind its rows'),
        ("empty", "the position {} behind its rows|it was asked from before"),
        ("numpy", "is not what JSON holds"),
        ("number", "gives the position 7, which is no mapping"),
        ("tuple", "gives tuple and no StreamRows"),
        ("many", "gives 11 rows where 10 were asked for"),
        ("short", "gives 1 values of 'item' for 10 rows"),
        ("columns", "gives rows without the column 'item'"),
    ],
)
def test_a_source_that_would_go_round_or_gives_no_rows_is_named(mistaken: None, how: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        read_through(open_source(f"wrong:{how}", LogColumns()), 4)
    assert (refused.value.option, refused.value.value) == ("nestrec.sources: wrong", "read")


def test_a_source_may_be_read_again_from_an_earlier_position(mistaken: None) -> None:
    source = open_source("wrong:nothing", LogColumns())
    assert read_through(source, 5) == {"row": 50}
    assert read_through(source, 5) == {"row": 50}
