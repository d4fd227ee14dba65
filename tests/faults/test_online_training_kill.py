"""SIGKILL of `nestrec train-stream`: a restarted run uses every event once and ends like an uninterrupted run."""

from pathlib import Path

import pytest
from killed_streams import LIMIT_S, Base, check_kills, check_random_kills

from support.fault_runner import FailPoint, Fault
from support.stream_fixtures import drop_files, stream_events

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.make(tmp_path_factory.mktemp("base"))


def test_online_training_kill_during_append_or_window(base: Base, tmp_path: Path) -> None:
    drop_files(tmp_path / "events", stream_events(64), events_per_file=25)
    faults: list[Fault] = [FailPoint("data.append.before_card@2=kill"), FailPoint("train.step@2=kill")]
    check_kills(base, tmp_path, str(tmp_path / "events"), ranks=1, faults=faults, events=64)


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["folder", "kafka"])
def test_online_training_50_random_kills_resume_exactly(base: Base, tmp_path: Path, kind: str, ranks: int) -> None:
    """There are 12 or 13 kills per source and number of ranks."""
    seed = ranks + 10 * (kind == "kafka")
    check_random_kills(base, tmp_path, kind, ranks=ranks, number=13 if ranks == 1 else 12, seed=seed)
