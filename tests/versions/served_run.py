"""A run that publishes versions and a server that follows it, in one process."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from changing_run import ChangingRun, assert_same

from nestrec.distributed import Topology
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import short_version
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader
from nestrec.serving.service.version_follower import VersionFollowConfig
from nestrec.serving.versions.version_manifest import Times

LIMITS = LimitsConfig(default_timeout_ms=10_000, expose_cache_source=True)
FOLLOW = VersionFollowConfig(enabled=True, mode="manual")


class ServedRun:
    """A run that publishes versions, and a server that follows it by calls of `follower.poll`."""

    def __init__(
        self,
        data: Path,
        folder: Path,
        family: str,
        instances: int = 1,
        tables: TablesConfig | None = None,
        *,
        read_timeout_s: float = FOLLOW.read_timeout_s,
    ):
        self.address = str(folder / "published")
        self._scratch = folder
        self.exported: dict[str, Servable] = {}
        self.run = ChangingRun.begin(
            Topology.single(), data, self.address, family=family, store="lru", seed=5, full_every_versions=4
        )
        self._cfg = ServiceConfig(engine=EngineConfig(max_queue_delay_s=1e9), engines_per_model=instances)
        self._tables = tables
        self._follow = replace(FOLLOW, read_timeout_s=read_timeout_s)
        self.publish()
        self.start()

    def start(self) -> None:
        """Start a server of the newest readable version."""
        self.service = Service.load([self.address], self._cfg, tables=self._tables)
        self.reloader = Reloader(self.service, "cpu", self._tables or TablesConfig(), self._follow)
        self.app = App(self.service, LIMITS, reloader=self.reloader)
        ((self.role, self.follower),) = self.reloader.followers.items()

    def publish(self, times: Times | None = None) -> str:
        """Publish a version after one random step, and return its full version name."""
        self.run.change()
        self.run.publisher.publish(self.run.session, self.run.step, times)
        self.run.publisher.close()
        self.note_export()
        newest = self.run.publisher.newest
        assert newest is not None
        return newest.servable_version

    def note_export(self) -> None:
        """Export the current step for later comparison, if the newest version is of this step."""
        newest = self.run.publisher.newest
        if newest is not None and newest.manifest.step == self.run.step:
            self.exported[newest.servable_version] = self.run.export(self._scratch)

    def folder_of(self, version: str) -> Path:
        return Path(self.address, "versions", short_version(version))

    @property
    def servable(self) -> Servable:
        return self.service.deployment(self.role).servable

    def check(self) -> None:
        """Check that the served version equals an export of its step."""
        assert_same(self.servable, self.exported[self.servable.version])

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost")

    def close(self) -> None:
        self.reloader.close()
        self.service.close()


@contextlib.contextmanager
def serving(*args: Any, **options: Any) -> Iterator[ServedRun]:
    """Yield a `ServedRun` with these arguments, and close it afterwards."""
    served = ServedRun(*args, **options)
    try:
        yield served
    finally:
        served.close()
