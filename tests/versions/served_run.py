"""A run that publishes and a server that follows it, in one process, for tests."""

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
from nestrec.serving.model.servable_spec import shown_version
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader
from nestrec.serving.service.version_follower import VersionFollowConfig
from nestrec.serving.versions.version_manifest import Times

LIMITS = LimitsConfig(default_timeout_ms=10_000, tells_prefix=True)
FOLLOW = VersionFollowConfig(on=True, moves="told")


class Served:
    """A run that publishes, and a server that follows it when it is told to."""

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
            Topology.single(), data, self.address, family=family, store="lru", seed=5, snapshot_every=4
        )
        self._cfg = ServiceConfig(engine=EngineConfig(max_queue_s=1e9), instances=instances)
        self._tables = tables
        self._follow = replace(FOLLOW, read_timeout_s=read_timeout_s)
        self.publish()
        self.start()

    def start(self) -> None:
        """A server of the newest version that can be read."""
        self.service = Service.load([self.address], self._cfg, tables=self._tables)
        self.reloader = Reloader(self.service, "cpu", self._tables or TablesConfig(), self._follow)
        self.app = App(self.service, LIMITS, reloader=self.reloader)
        ((self.role, self.follower),) = self.reloader.followers.items()

    def publish(self, times: Times | None = None) -> str:
        """The name of the version."""
        self.run.change()
        self.run.publisher.publish(self.run.session, self.run.step, times)
        self.run.publisher.close()
        self.note_export()
        newest = self.run.publisher.newest
        assert newest is not None
        return newest.servable_version

    def note_export(self) -> None:
        """What an export holds now, where a version of this step is the newest."""
        newest = self.run.publisher.newest
        if newest is not None and newest.manifest.step == self.run.step:
            self.exported[newest.servable_version] = self.run.export(self._scratch)

    def folder_of(self, version: str) -> Path:
        return Path(self.address, "versions", shown_version(version))

    @property
    def servable(self) -> Servable:
        return self.service.fleet(self.role).servable

    def check(self) -> None:
        """What is in service is what an export of its step holds."""
        assert_same(self.servable, self.exported[self.servable.version])

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost")

    def close(self) -> None:
        self.reloader.close()
        self.service.close()


@contextlib.contextmanager
def serving(*args: Any, **options: Any) -> Iterator[Served]:
    served = Served(*args, **options)
    try:
        yield served
    finally:
        served.close()
