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
    """Where the real datasets lie: NESTREC_DATA, or beside the checkout."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("NESTREC_DATA", default))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    root = data_root()
    if not root.exists():
        pytest.skip("no real datasets here: set NESTREC_DATA to the folder that holds them")
    return root


class Pools:
    """Pools by number of ranks, started when first asked for; they live as long as the tests of a file.

    Not longer: the groups that jobs make stay with their ranks, and so do the threads behind these, which poll.
    """

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __getitem__(self, world: int) -> "RankPool":
        from support.rank_pool import RankPool  # torch is not loaded for tests that need none

        if world not in self._pools:
            self._pools[world] = RankPool(world)
        return self._pools[world]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected, and modules with it, is never garbage: looked through neither now nor with every test."""
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
    """The longest files begin first, so that what is left over at the end is short.

    Not by their place on the command line: pytest gives a file its place in a folder that stands there too.
    """
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws without a seed of its own does not depend on the tests that happened to run before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


# How long it takes to make examples up says more about who else is on the machine than about a test.
BY_TIME = [HealthCheck.too_slow]
settings.register_profile("nestrec", deadline=None, derandomize=True, max_examples=60, suppress_health_check=BY_TIME)
settings.load_profile("nestrec")


@pytest.fixture(scope="module")
def service() -> "Iterator[Service]":
    """The smallest one: it retrieves from 50 items."""
    from nestrec.models.hstu import HSTUConfig  # torch is not loaded for tests that need none
    from nestrec.serving.engine.batch_scheduler import EngineConfig
    from nestrec.serving.service.inference_service import Service, ServiceConfig
    from nestrec_bench.harness.random_model import random_retrieval

    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
    cfg = ServiceConfig(engine=EngineConfig(max_queue_s=1e9))  # nobody is refused where the machine is busy
    service = Service({"retrieval": random_retrieval(encoder, num_items=50)}, cfg)
    yield service
    service.close()
