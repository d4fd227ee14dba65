"""Pools of ranks that live as long as the tests: starting a process costs seconds, calling a function in it nothing."""

from collections.abc import Iterator

import pytest

from nestrec.testing.ranks import RankPool


class Pools:
    """Pools by number of ranks, started when first asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __getitem__(self, world: int) -> RankPool:
        if world not in self._pools:
            self._pools[world] = RankPool(world)
        return self._pools[world]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()
