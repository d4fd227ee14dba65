"""Format and source plugins: their return values are validated."""

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
COLUMNS = {"user": USERS, "item": ITEMS}


def prepare_batch(monkeypatch: pytest.MonkeyPatch, output: Path, batch: Any) -> None:
    columns = EventColumns.of(LogColumns())
    source = LogSource("mine", "mine", columns, lambda: iter([(batch, 1.0) if isinstance(batch, RawBatch) else batch]))
    monkeypatch.setitem(FORMATS._built_in, "mine", log_format("mine", PrepareOptions, lambda path, options: source))
    monkeypatch.delitem(FORMATS._loaded, "mine", raising=False)
    prepare("mine", output, output / "data")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (RawBatch("f", np.arange(4), {"user": USERS}), "no such column in f"),
        (RawBatch("f", np.arange(5), COLUMNS), "column 'user' of f has 4 values for 5 lines"),
        (RawBatch("f", np.arange(4), {**COLUMNS, "user": ["a"] * 4}), "column 'user' of f is a list"),  # type: ignore[dict-item]
        ("no batch", "`batches` of the format yields str"),
    ],
)
def test_plugin_format_with_wrong_batches_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, batch: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare_batch(monkeypatch, tmp_path, batch)
    assert not (tmp_path / "data").exists()
    prepare_batch(monkeypatch, tmp_path, RawBatch("f", np.arange(4), COLUMNS))


def test_plugin_format_without_card_or_source_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(FORMATS._built_in, "cardless", FormatSpec("none", PrepareOptions, lambda i, o, p, q: None))  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match=r"cardless=prepare: .*returned None instead of a DatasetCard"):
        prepare("cardless", tmp_path, tmp_path / "data")
    monkeypatch.setitem(FORMATS._built_in, "empty", log_format("an empty one", PrepareOptions, lambda path, options: 3))  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="an empty one: `open` of the format returned 3"):
        prepare("empty", tmp_path, tmp_path / "data")


class FaultySource(StreamSource):
    """Returns ten rows per read, with the fault that the address names."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def lag(self, position: Any) -> dict[str, float]:
        return {}

    def read(self, position: Any, max_rows: int) -> Any:
        at = position.get("row", 0)
        num = {"empty": 0, "many": 11}.get(self.fault, 10)
        next_row: Any = {"back": 10 if at >= 20 else at + 10, "stay": at, "empty": at}.get(self.fault, at + 10)
        next_position: Any = {"row": np.int64(next_row) if self.fault == "numpy" else next_row}
        columns = {"user": pa.array(["u"] * num), "item": pa.array(["i"] * (1 if self.fault == "short" else num))}
        if self.fault == "columns":
            del columns["item"]
        rows = StreamRows(RawBatch("f", np.arange(num), columns), 7 if self.fault == "number" else next_position, 1.0)  # type: ignore[arg-type]
        return (rows, next_position) if self.fault == "tuple" else rows


@pytest.fixture
def faulty_source(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    spec = StreamSourceSpec(
        "s", lambda a: a.startswith("wrong:"), lambda address, *_: FaultySource(address.partition(":")[2])
    )
    monkeypatch.setitem(SOURCES._loaded, "wrong", spec)
    monkeypatch.setitem(SOURCES._external, "wrong", None)
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
    ("fault", "message"),
    [
        ("back", 'the position {"row": 10} after its rows, from which it was read before'),
        ("stay", 'the position {"row": 0} after its rows'),
        ("empty", "the position {} after its rows|from which it was read before"),
        ("numpy", "is not JSON-serializable"),
        ("number", "returned the position 7, which is not a mapping"),
        ("tuple", "returned tuple instead of StreamRows"),
        ("many", "returned 11 rows, but 10 were requested"),
        ("short", "returned 1 values of 'item' for 10 rows"),
        ("columns", "returned rows without the column 'item'"),
    ],
)
def test_plugin_source_with_wrong_rows_or_position_is_named(faulty_source: None, fault: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        read_through(open_source(f"wrong:{fault}", LogColumns()), 4)
    assert (raised.value.option, raised.value.value) == ("nestrec.sources: wrong", "read")


def test_plugin_source_can_be_reread_from_earlier_position(faulty_source: None) -> None:
    source = open_source("wrong:nothing", LogColumns())
    assert read_through(source, 5) == {"row": 50}
    assert read_through(source, 5) == {"row": 50}
