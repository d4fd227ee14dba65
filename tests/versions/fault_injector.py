"""Fault injection between a run that publishes versions and a server that follows it: kills and file faults.

After each fault, the version in service must be a published one and bitwise equal to an export of its step. After a few
more versions, the server must serve the newest one.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from served_run import ServedRun

from nestrec.exporters.version_publisher import Publisher
from nestrec.training.run_config import PublishConfig
from support.fail_points import armed

PUBLISHING = [
    *(
        f"publish.{kind}.{moment}"
        for kind in ("delta", "full")
        for moment in ("before_files", "between_files", "before_manifest", "after_manifest")
    ),
    "publish.after_newest",
    "publish.during_pruning",
]
APPLYING = ["follow.before_apply", "follow.between_tables", "follow.before_names", "follow.after_apply"]


class KilledError(BaseException):
    """Simulates SIGKILL: a `BaseException` that no handler of the product catches, so that no cleanup runs."""


class FaultInjector:
    """Injects faults into a served run and checks the version in service after each of them."""

    def __init__(self, served: ServedRun, seed: int):
        self.served = served
        self._random = np.random.default_rng(seed)
        self.counts: Counter[str] = Counter()
        """Number of injected faults by name."""
        self.faults: dict[str, Callable[[], bool]] = {
            **{f"publisher killed at {point}": lambda point=point: self.kill_publisher(point) for point in PUBLISHING},
            **{f"server fails at {point}": lambda point=point: self.fail_server(point) for point in APPLYING},
            "trainer killed between two versions": self.kill_trainer,
            "server killed and restarted": self.kill_server,
            "byte of a delta file changed": lambda: self.change_file("delta-*"),
            "byte of a full version's file changed": lambda: self.change_file("full-*"),
            "manifest changed": lambda: self.change_file("*.json"),
            "file truncated": self.truncate_file,
            "file missing": self.delete_file,
            "version missing": self.delete_version,
            "newest.json damaged": self.damage_newest,
            "version overwritten with an earlier one": self.overwrite_version,
            "newest.json outdated": self.restore_old_newest,
        }

    def run(self, count: int, kinds: Sequence[str] = ()) -> Iterator[str]:
        """Inject `count` faults round-robin over `kinds`, or over all kinds; yield the name of each after its check."""
        names = list(kinds or self.faults)
        number = 0
        while sum(self.counts.values()) < count:
            name = names[number % len(names)]
            number += 1
            if self.faults[name]():
                self.counts[name] += 1
                self.poll_and_check()
                yield name
            for _ in range(int(self._random.integers(1, 3))):
                self.served.publish()
                self.poll_and_check()

    def check_recovery(self) -> None:
        """Check that the server serves the newest version after a few more versions."""
        for _ in range(8):
            self.served.publish()
            self.poll_and_check()
        newest = self.served.run.publisher.newest
        assert newest is not None
        assert self.served.servable.version == newest.servable_version

    def poll_and_check(self) -> None:
        self.served.follower.poll()
        self.served.check()

    # Kills.

    def kill_publisher(self, point: str) -> bool:
        """Kill the publisher while it publishes, and restart it at the current step."""
        hits: list[str] = []

        def hit() -> None:
            hits.append(point)
            raise KilledError

        for _ in range(6):  # not every version reaches every fail point
            with armed(point, hit):
                try:
                    self.served.publish()
                except KilledError:
                    break
            self.poll_and_check()
        if hits:
            self._restart_trainer()
            self.served.note_export()
        return bool(hits)

    def kill_trainer(self) -> bool:
        self.served.run.change()
        self._restart_trainer()
        return True

    def _restart_trainer(self) -> None:
        run = self.served.run
        cfg = PublishConfig(address=self.served.address, full_every_versions=4, max_versions=7)
        run.publisher = Publisher(cfg, run.session, step=run.step, warn=lambda _: None)

    def kill_server(self) -> bool:
        self.served.close()
        self.served.start()
        return True

    def fail_server(self, point: str) -> bool:
        def fail() -> None:
            raise RuntimeError("out of memory")

        self.served.publish()
        applied = self.served.follower.counts.applied
        with armed(point, fail):
            self.poll_and_check()
        return self.served.follower.counts.applied == applied

    # Files.

    def _newest_folder(self) -> Path:
        folders = sorted(Path(self.served.address, "versions").iterdir())
        return folders[-1]

    def _file(self, pattern: str) -> Path | None:
        files = sorted(self._newest_folder().glob(pattern))
        return files[self._random.integers(len(files))] if files else None

    def change_file(self, pattern: str) -> bool:
        self.served.publish()
        file = self._file(pattern)
        if file is None:
            return False
        content = bytearray(file.read_bytes())
        content[self._random.integers(len(content))] ^= 1 << self._random.integers(8)
        file.write_bytes(content)
        return True

    def truncate_file(self) -> bool:
        self.served.publish()
        file = self._file("*")
        if file is None:
            return False
        file.write_bytes(file.read_bytes()[: self._random.integers(file.stat().st_size)])
        return True

    def delete_file(self) -> bool:
        self.served.publish()
        file = self._file("*")
        if file is not None:
            file.unlink()
        return file is not None

    def delete_version(self) -> bool:
        """Delete the parent of the newest version before the server has read either."""
        self.served.publish()
        folder = self._newest_folder()
        self.served.publish()
        shutil.rmtree(folder)
        return True

    def damage_newest(self) -> bool:
        self.served.publish()
        file = Path(self.served.address, "newest.json")
        file.write_bytes(file.read_bytes()[:-3] + b"???")
        return True

    def overwrite_version(self) -> bool:
        """Replace the newest version with a copy of the version before it."""
        self.served.publish()
        earlier = self._newest_folder()
        self.served.publish()
        newest = self._newest_folder()
        if newest == earlier:
            return False
        shutil.rmtree(newest)
        shutil.copytree(earlier, newest)
        return True

    def restore_old_newest(self) -> bool:
        """Restore an earlier `newest.json`, as a stale cache would return it."""
        file = Path(self.served.address, "newest.json")
        before = file.read_bytes()
        self.served.publish()
        self.poll_and_check()
        file.write_bytes(before)
        return True
