"""Fixtures shared by all tests."""

import gc
import os
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from nestrec.serving.service.inference_service import Service
    from support.rank_pool import RankPool


def data_root() -> Path:
    """Return the folder of the real datasets: NESTREC_DATA, or `shared/data` next to the checkout."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("NESTREC_DATA", default))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    root = data_root()
    if not root.exists():
        pytest.skip("no real datasets found: set NESTREC_DATA to the folder that contains them")
    return root


class RankPools:
    """Rank pools by number of ranks, started on first use and closed after the tests of a file.

    They are not shared between files, because process groups that tests create stay open in the ranks, and the threads
    of these groups poll.
    """

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __getitem__(self, world: int) -> "RankPool":
        from support.rank_pool import RankPool  # imported here so that other tests do not load torch

        if world not in self._pools:
            self._pools[world] = RankPool(world)
        return self._pools[world]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude collected tests and imported modules from garbage collection, now and during the tests.

    They live until the end, so scanning them again for every test is a waste of time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


LONGEST = (
    "test_under_interpreter.py",
    "test_schedules.py",
    "test_training_ranks.py",
    "test_balanced_training.py",
    "test_training_schedules.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first, so that parallel workers finish at about the same time.

    The order of arguments on the command line cannot do this: if a file and its folder are both listed, pytest runs the
    file at its position in the folder.
    """
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the global random generators, so that a test does not depend on the tests that ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


# The time for generating examples depends more on other load of the machine than on the test.
TIME_CHECKS = [HealthCheck.too_slow]
settings.register_profile(
    "nestrec", deadline=None, derandomize=True, max_examples=60, suppress_health_check=TIME_CHECKS
)
settings.load_profile("nestrec")


@pytest.fixture(scope="module")
def service() -> "Iterator[Service]":
    """Yield a minimal service with a retrieval model of 50 items."""
    from nestrec.models.hstu import HSTUConfig  # imported here so that other tests do not load torch
    from nestrec.serving.engine.batch_scheduler import EngineConfig
    from nestrec.serving.service.inference_service import Service, ServiceConfig
    from nestrec_bench.harness.random_model import random_retrieval

    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
    cfg = ServiceConfig(engine=EngineConfig(max_queue_delay_s=1e9))  # no request is shed if the machine is busy
    service = Service({"retrieval": random_retrieval(encoder, num_items=50)}, cfg)
    yield service
    service.close()
