"""A folder as the source of a stream: files appear whole and stay as they were; what is no source is told."""

import gzip
import shutil
from pathlib import Path

import pytest

from nestrec.base.errors import DataError, UserError
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.streaming.folder_source import FolderSource
from nestrec.data.streaming.stream_source import StreamPosition, open_source
from support.stream_fixtures import drop_files, stream_events


def test_files_that_are_taken_away_before_they_were_read_are_told_of(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    wanted = tuple(stream_events(1)[0])
    drop_files(folder, stream_events(4), events_a_file=2)
    source = FolderSource(folder, LogColumns(), wanted)
    first = source.read({}, 1)
    assert first is not None
    (folder / "part-00000.jsonl").unlink()
    with pytest.raises(UserError, match=r"(?s)part-00000.jsonl.*cannot be read"):
        source.read(first.position, 1)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="cannot be read"):
        source.read({}, 1)


def test_a_file_that_changes_after_it_was_read_is_told_of(tmp_path: Path) -> None:
    """What is written behind its end would never be read; of a shorter one, rows would be skipped."""
    folder = tmp_path / "events"
    wanted = tuple(stream_events(1)[0])
    drop_files(folder, stream_events(40), events_a_file=20)
    (folder / "part-00001.jsonl").rename(tmp_path / "later.jsonl")
    file = folder / "part-00000.jsonl"
    whole = file.read_text()
    source = FolderSource(folder, LogColumns(), wanted)
    half, all_of_it = source.read({}, 12), source.read({}, 20)
    assert half is not None
    assert all_of_it is not None
    assert "file" not in all_of_it.position, "who waits for more would read it again at every look"
    for text in (whole + whole.splitlines()[0] + "\n", whole[: len(whole) // 4]):
        file.write_text(text)
        for rows in (half, all_of_it):
            with pytest.raises(UserError, match=r"(?s)part-00000.jsonl.*bytes when it was read.*must appear whole"):
                FolderSource(folder, LogColumns(), wanted).read(rows.position, 20)
    # Packed or taken away when it has been read, it is what it was; the next file comes.
    file.unlink()
    with gzip.open(folder / "part-00000.jsonl.gz", "wt") as packed:
        packed.write(whole)
    (tmp_path / "later.jsonl").rename(folder / "part-00001.jsonl")
    rest = source.read(all_of_it.position, 30)
    assert rest is not None
    assert (rest.batch.file, rest.batch.num_rows) == ("part-00001.jsonl", 20)
    assert source.read(rest.position, 30) is None


def test_a_file_that_is_not_whole_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "half.jsonl.gz").write_bytes(gzip.compress(b'{"user": 1}\n' * 999)[:-20])
    with pytest.raises(DataError, match=r"(?s)half.jsonl.gz.*must appear whole.*goes on where it stood"):
        FolderSource(tmp_path, LogColumns(), ("user",)).read({}, 5)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("{}/nothing", "no folder that there is"),
        ("{}/file.csv", "it is a file"),
        ("kafka://localhost:9092", "names no brokers or no topic"),
        ("kafka:///events", "names no brokers or no topic"),
    ],
)
def test_what_is_no_source_is_refused_with_the_reason(tmp_path: Path, address: str, problem: str) -> None:
    (tmp_path / "file.csv").touch()
    with pytest.raises(UserError, match=problem):
        open_source(address.format(tmp_path), LogColumns())


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_folder_lag_falls_as_a_file_is_read(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"events.{suffix}"
    lines = [f'{{"user": {i}}}' if suffix == "jsonl" else f"{i}" for i in range(100, 200)]
    file.write_text("\n".join([*(["user"] if suffix == "csv" else []), *lines]) + "\n")
    source = FolderSource(tmp_path, LogColumns(), ("user",))
    size = file.stat().st_size
    position: StreamPosition = {}
    left = []
    while (rows := source.read(position, 25)) is not None:
        position = rows.position
        left.append(source.lag(position)["bytes"] / size)
    assert left == pytest.approx([0.75, 0.5, 0.25, 0.0])
