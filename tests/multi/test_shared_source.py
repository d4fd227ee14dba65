"""Ranks that share the files or partitions of a stream read the same rows in the same order as one rank."""

from pathlib import Path

import pytest
from source_jobs import count_collectives_while_idle, follow_until_sigterm, read_all

from nestrec.distributed import Topology
from support.rank_pool import RankFailure
from support.stream_fixtures import drop_files, stream_events, topic
from support.tiny_runs import make_datasets


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Write small files: one is empty, one is larger than a batch of rows, and one has an invalid row."""
    for number, size in enumerate((7, 5, 0, 40, 3, 6, 9)):
        drop_files(tmp_path / str(number), stream_events(size, seed=number), events_per_file=50)
        path = tmp_path / f"part-{number}.jsonl"
        path.write_text("".join(file.read_text() for file in (tmp_path / str(number)).glob("*.jsonl")))
    with path.open("a") as file:
        file.write("this is not JSON\n")
    return str(tmp_path)


@pytest.mark.parametrize("max_rows", [4, 16])
def test_shared_source_reads_files_in_order_of_one_rank(pools, folder: str, max_rows: int) -> None:
    rows, positions, affinities = read_all(Topology.single(), folder, max_rows)
    assert sum(len(lines) for _, lines, _, _ in rows) == 70
    assert sum(bad for *_, bad in rows) == 1
    assert set(affinities) == set(range(7))
    first, second = pools[2].run(read_all, folder, max_rows)
    assert first[:2] == (rows, positions)
    assert (set(first[2]), set(second[2])) == ({0, 2, 4, 6}, {1, 3, 5})


def test_shared_source_reads_partitions_in_order_of_one_rank(pools) -> None:
    with topic(stream_events(1700)) as address:
        rows, positions, affinities = read_all(Topology.single(), address, 700)
        first, second = pools[2].run(read_all, address, 700)
    assert sum(len(lines) for _, lines, _, _ in rows) == 1700
    assert set(affinities) == {0, 1, 2}
    assert first[:2] == (rows, positions)
    assert (set(first[2]), set(second[2])) == ({0, 2}, {1})


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_shared_source_read_error_reaches_all_ranks(pools, folder: str, failing_rank: int) -> None:
    for outcome in pools[2].outcomes(read_all, folder, 16, failing_rank):
        assert isinstance(outcome, RankFailure)
        assert outcome.kind == "UserError"
        assert "cannot be read" in outcome.text


def test_shared_source_idle_reads_are_collective(pools, tmp_path: Path) -> None:
    """Without collectives of idle reads, the other ranks would time out and report rank 0 as lost."""
    few, many = (pools[2].run(count_collectives_while_idle, str(tmp_path), num_reads) for num_reads in (1, 4))
    assert all(after >= before + 3 for before, after in zip(few, many, strict=True))


def test_shared_source_stop_of_one_rank_ends_all(pools, tmp_path: Path) -> None:
    make_datasets(tmp_path)
    (tmp_path / "events").mkdir()
    were_stopped = pools[2].run(follow_until_sigterm, str(tmp_path), str(tmp_path / "run"), str(tmp_path / "events"))
    assert were_stopped == [True, True]
