"""A folder as a stream source: files must appear atomically and never change; invalid sources are rejected."""

import gzip
import shutil
from pathlib import Path

import pytest

from nestrec.base.errors import DataError, UserError
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.streaming.folder_source import FolderSource
from nestrec.data.streaming.stream_source import StreamPosition, open_source
from support.stream_fixtures import drop_files, stream_events


def test_folder_source_reports_files_deleted_before_reading(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    columns = tuple(stream_events(1)[0])
    drop_files(folder, stream_events(4), events_per_file=2)
    source = FolderSource(folder, LogColumns(), columns)
    first = source.read({}, 1)
    assert first is not None
    (folder / "part-00000.jsonl").unlink()
    with pytest.raises(UserError, match=r"(?s)part-00000.jsonl.*cannot be read"):
        source.read(first.position, 1)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="cannot be read"):
        source.read({}, 1)


def test_folder_source_reports_files_changed_after_reading(tmp_path: Path) -> None:
    """Rows appended to a file that was read would never be read; in a shorter file, rows would be skipped."""
    folder = tmp_path / "events"
    columns = tuple(stream_events(1)[0])
    drop_files(folder, stream_events(40), events_per_file=20)
    (folder / "part-00001.jsonl").rename(tmp_path / "later.jsonl")
    file = folder / "part-00000.jsonl"
    full_text = file.read_text()
    source = FolderSource(folder, LogColumns(), columns)
    half, complete = source.read({}, 12), source.read({}, 20)
    assert half is not None
    assert complete is not None
    assert "file" not in complete.position, "the file would be read again at every poll"
    for text in (full_text + full_text.splitlines()[0] + "\n", full_text[: len(full_text) // 4]):
        file.write_text(text)
        for rows in (half, complete):
            with pytest.raises(
                UserError, match=r"(?s)part-00000.jsonl.*bytes when it was read.*must appear atomically"
            ):
                FolderSource(folder, LogColumns(), columns).read(rows.position, 20)
    # A file that was read completely may be compressed or deleted; reading continues with the next file.
    file.unlink()
    with gzip.open(folder / "part-00000.jsonl.gz", "wt") as packed:
        packed.write(full_text)
    (tmp_path / "later.jsonl").rename(folder / "part-00001.jsonl")
    rest = source.read(complete.position, 30)
    assert rest is not None
    assert (rest.batch.file, rest.batch.num_rows) == ("part-00001.jsonl", 20)
    assert source.read(rest.position, 30) is None


def test_folder_source_rejects_truncated_file_with_remedy(tmp_path: Path) -> None:
    (tmp_path / "half.jsonl.gz").write_bytes(gzip.compress(b'{"user": 1}\n' * 999)[:-20])
    with pytest.raises(DataError, match=r"(?s)half.jsonl.gz.*must appear atomically.*resumes from the last position"):
        FolderSource(tmp_path, LogColumns(), ("user",)).read({}, 5)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("{}/nothing", "the folder does not exist"),
        ("{}/file.csv", "a file cannot be a stream source"),
        ("kafka://localhost:9092", "the address lacks brokers or a topic"),
        ("kafka:///events", "the address lacks brokers or a topic"),
    ],
)
def test_stream_source_address_is_validated(tmp_path: Path, address: str, problem: str) -> None:
    (tmp_path / "file.csv").touch()
    with pytest.raises(UserError, match=problem):
        open_source(address.format(tmp_path), LogColumns())


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_folder_source_lag_falls_as_a_file_is_read(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"events.{suffix}"
    lines = [f'{{"user": {i}}}' if suffix == "jsonl" else f"{i}" for i in range(100, 200)]
    file.write_text("\n".join([*(["user"] if suffix == "csv" else []), *lines]) + "\n")
    source = FolderSource(tmp_path, LogColumns(), ("user",))
    size = file.stat().st_size
    position: StreamPosition = {}
    remaining = []
    while (rows := source.read(position, 25)) is not None:
        position = rows.position
        remaining.append(source.lag(position)["bytes"] / size)
    assert remaining == pytest.approx([0.75, 0.5, 0.25, 0.0])
