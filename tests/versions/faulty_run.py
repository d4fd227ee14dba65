"""Faults between a run that publishes and a server that follows it: kills, and whatever can happen to files.

After each fault the version in service must be one that was published, and hold to the bit what an export of its step
holds; and after a few versions more the server must have come to the newest.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from served_run import Served

from nestrec.exporters.version_publisher import Publisher
from nestrec.training.run_config import PublishConfig
from support.fail_points import armed

PUBLISHING = [
    *(
        f"publish.{kind}.{place}"
        for kind in ("delta", "full")
        for place in ("before_files", "between_files", "before_manifest", "after_manifest")
    ),
    "publish.after_newest",
    "publish.during_pruning",
]
APPLYING = ["follow.before_apply", "follow.between_tables", "follow.before_names", "follow.after_apply"]


class KilledError(BaseException):
    """Nobody catches it, so nothing is tidied up."""


def killed() -> None:
    raise KilledError


class FaultyRun:
    """Does faults to a served run."""

    def __init__(self, served: Served, seed: int):
        self.served = served
        self._random = np.random.default_rng(seed)
        self.done: Counter[str] = Counter()
        self.faults: dict[str, Callable[[], bool]] = {
            **{f"publisher killed at {point}": lambda point=point: self.kill_publisher(point) for point in PUBLISHING},
            **{f"server fails at {point}": lambda point=point: self.fail_server(point) for point in APPLYING},
            "trainer killed between two versions": self.kill_trainer,
            "server killed and started again": self.kill_server,
            "a byte of a file of a delta changed": lambda: self.change_file("delta-*"),
            "a byte of a file of a full version changed": lambda: self.change_file("full-*"),
            "a manifest changed": lambda: self.change_file("*.json"),
            "a file cut short": self.cut_file,
            "a file missing": self.lose_file,
            "a version missing": self.lose_version,
            "newest.json damaged": self.damage_newest,
            "a version doubled in another's place": self.double_version,
            "newest.json of an earlier time": self.turn_back,
        }

    def run(self, count: int, kinds: Sequence[str] = ()) -> Iterator[str]:
        """So many faults, each kind (or each of these) in its turn; their names, as they are done and checked."""
        names = list(kinds or self.faults)
        number = 0
        while sum(self.done.values()) < count:
            name = names[number % len(names)]
            number += 1
            if self.faults[name]():
                self.done[name] += 1
                self.look()
                yield name
            for _ in range(int(self._random.integers(1, 3))):
                self.served.publish()
                self.look()

    def heal(self) -> None:
        """A few versions later the server is where the run is."""
        for _ in range(8):
            self.served.publish()
            self.look()
        newest = self.served.run.publisher.newest
        assert newest is not None
        assert self.served.servable.version == newest.servable_version

    def look(self) -> None:
        self.served.follower.look()
        self.served.check()

    # Kills.

    def kill_publisher(self, point: str) -> bool:
        """In the middle of a version; the run is started again from where it stands."""
        hits: list[str] = []

        def hit() -> None:
            hits.append(point)
            killed()

        for _ in range(6):  # not every version comes to every place
            with armed(point, hit):
                try:
                    self.served.publish()
                except KilledError:
                    break
            self.look()
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
        cfg = PublishConfig(address=self.served.address, snapshot_every=4, keep=7)
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
            self.look()
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

    def cut_file(self) -> bool:
        self.served.publish()
        file = self._file("*")
        if file is None:
            return False
        file.write_bytes(file.read_bytes()[: self._random.integers(file.stat().st_size)])
        return True

    def lose_file(self) -> bool:
        self.served.publish()
        file = self._file("*")
        if file is not None:
            file.unlink()
        return file is not None

    def lose_version(self) -> bool:
        """One that the newest builds on, before the server has seen either."""
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

    def double_version(self) -> bool:
        """All of an earlier version under the name of the newest."""
        self.served.publish()
        earlier = self._newest_folder()
        self.served.publish()
        newest = self._newest_folder()
        if newest == earlier:
            return False
        shutil.rmtree(newest)
        shutil.copytree(earlier, newest)
        return True

    def turn_back(self) -> bool:
        """A cache on the way gives out what was there before."""
        file = Path(self.served.address, "newest.json")
        before = file.read_bytes()
        self.served.publish()
        self.look()
        file.write_bytes(before)
        return True
