"""Ranks that share the files or partitions of a stream read what one rank reads, in the same order."""

from pathlib import Path

import pytest
from source_jobs import follow_until_told, read_all, words_while_nothing_comes

from nestrec.distributed import Topology
from support.rank_pool import RankFailure
from support.stream_fixtures import drop_files, stream_events, topic
from support.tiny_runs import make_datasets


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Small files, one of no rows, one larger than what is read at a time, and one with a bad row."""
    for number, size in enumerate((7, 5, 0, 40, 3, 6, 9)):
        drop_files(tmp_path / str(number), stream_events(size, seed=number), events_a_file=50)
        path = tmp_path / f"part-{number}.jsonl"
        path.write_text("".join(found.read_text() for found in (tmp_path / str(number)).glob("*.jsonl")))
    with path.open("a") as file:
        file.write("this is no JSON\n")
    return str(tmp_path)


@pytest.mark.parametrize("max_rows", [4, 16])
def test_files_are_shared_out_and_read_in_the_order_of_one_rank(pools, folder: str, max_rows: int) -> None:
    rows, positions, shares = read_all(Topology.single(), folder, max_rows)
    assert sum(len(lines) for _, lines, _, _ in rows) == 70
    assert sum(bad for *_, bad in rows) == 1
    assert set(shares) == set(range(7))
    first, second = pools[2].run(read_all, folder, max_rows)
    assert first[:2] == (rows, positions)
    assert (set(first[2]), set(second[2])) == ({0, 2, 4, 6}, {1, 3, 5})


def test_partitions_are_shared_out_and_read_in_the_order_of_one_rank(pools) -> None:
    with topic(stream_events(1700)) as address:
        rows, positions, shares = read_all(Topology.single(), address, 700)
        first, second = pools[2].run(read_all, address, 700)
    assert sum(len(lines) for _, lines, _, _ in rows) == 1700
    assert set(shares) == {0, 1, 2}
    assert first[:2] == (rows, positions)
    assert (set(first[2]), set(second[2])) == ({0, 2}, {1})


@pytest.mark.parametrize("spoiled", [0, 1])
def test_what_one_rank_cannot_read_is_an_error_of_all(pools, folder: str, spoiled: int) -> None:
    for outcome in pools[2].outcomes(read_all, folder, 16, spoiled):
        assert isinstance(outcome, RankFailure)
        assert outcome.kind == "UserError"
        assert "is spoiled" in outcome.text


def test_ranks_hear_of_the_first_while_a_source_is_quiet(pools, tmp_path: Path) -> None:
    """Who hears nothing for as long as a peer may be silent would take it for lost, and end."""
    few, many = (pools[2].run(words_while_nothing_comes, str(tmp_path), looks) for looks in (1, 4))
    assert all(after >= before + 3 for before, after in zip(few, many, strict=True))


def test_a_stop_of_any_rank_ends_all_while_they_wait_for_events(pools, tmp_path: Path) -> None:
    make_datasets(tmp_path)
    (tmp_path / "events").mkdir()
    told = pools[2].run(follow_until_told, str(tmp_path), str(tmp_path / "run"), str(tmp_path / "events"))
    assert told == [True, True]
