"""Checkpoints in a second place, any address of `fsspec`: copied there as they are saved, and taken from there by a run
whose folder has none, such as one that goes on on another machine.

A checkpoint is there when its manifest is, which is written last. Each rank copies its share of the files, and takes
back its share; every file is compared with its digest on both ways.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nestrec.base.errors import DamagedError
from nestrec.base.failpoints import fail_point
from nestrec.base.paths import sync_folder
from nestrec.checkpoint.durable import remove_folder, rename_folder, write_file
from nestrec.checkpoint.folders import folder_of, step_of
from nestrec.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, decode, digest_of, encode
from nestrec.checkpoint.peers import Peers, SaveError
from nestrec.checkpoint.places import place_of
from nestrec.checkpoint.verify import read_chain

_PIECE_BYTES = 16 << 20
T = TypeVar("T")


class Elsewhere:
    """The second place. All ranks make the same calls in the same order."""

    def __init__(self, address: str, peers: Peers):
        self._place, self._peers = place_of(address), peers

    @property
    def address(self) -> str:
        return self._place.address

    def steps(self) -> list[int]:
        """Steps of which a manifest is there, in order."""
        return self._on_first(self._steps, f"{self.address} could not be looked into") or []

    def newest_state(self) -> dict[str, Any] | None:
        """That of the newest checkpoint which is there, as far as it can be read; none where there is none. Local."""
        with contextlib.suppress(OSError, DamagedError):  # whoever copies to it or takes from it is told
            for step in reversed(self._steps()):
                manifest = self._manifest(step)
                (entry,) = (entry for entry in manifest.files if entry.kind == "state")
                content = self._place.read(f"{folder_of(Path(), step).name}/{entry.name}")
                if hashlib.sha256(content).hexdigest() == entry.sha256:
                    state: dict[str, Any] = json.loads(content)
                    return state
        return None

    def send(self, path: Path, kept: list[int]) -> None:
        """Copy a checkpoint and what it builds on, as far as that is not there; then delete all but the kept steps.

        `SaveError` on all ranks when one of them cannot.
        """
        problem = f"{path.name} could not be copied to {self.address}"
        for folder, manifest in reversed(read_chain(path)):
            if self._on_first(partial(self._digest, manifest.step), problem) == digest_of(manifest):
                continue
            self._on_first(partial(self._place.remove, folder.name), problem)
            self._peers.agree(partial(self._send_files, folder, manifest), problem)
            fail_point("checkpoint.before_sent_manifest")
            self._on_first(partial(self._place.replace, f"{folder.name}/{MANIFEST_NAME}", encode(manifest)), problem)
        self._on_first(partial(self._retire, kept), problem)

    def fetch(self, parent: Path, step: int) -> str | None:
        """Take a checkpoint and what it builds on into a folder; what is wrong, where it cannot be had whole."""
        problem = f"step {step} could not be taken from {self.address}"
        try:
            chain = self._on_first(partial(self._chain, step), problem) or []
            for each in chain:
                beside = _beside(parent, each)
                self._on_first(partial(_begin, beside), problem)
                self._peers.agree(partial(self._fetch_files, beside, each), problem)
                fail_point("checkpoint.after_fetched")
            # Only now: whoever finds any in the folder does not look here again.
            self._on_first(partial(self._place_here, parent, chain), problem)
        except SaveError as error:
            return error.problem
        return None

    def _on_first(self, action: Callable[[], T], problem: str) -> T | None:
        """What the first rank finds, on all of them."""
        return self._peers.agree(action if self._peers.is_first else _do_nothing, problem)[0]

    def _steps(self) -> list[int]:
        steps = [step for name in self._place.folders("") if (step := step_of(name)) is not None]
        return [step for step in sorted(steps) if self._digest(step) is not None]

    def _chain(self, step: int) -> list[int]:
        """The step and those that it builds on, oldest first."""
        chain, manifest = [step], self._manifest(step)
        while manifest.base is not None:
            base, manifest = manifest.base, self._manifest(manifest.base.step)
            if digest_of(manifest) != base.digest:
                raise DamagedError("is not the one that the later one builds on", field="base", value=base.step)
            chain.append(base.step)
        return chain[::-1]

    def _manifest(self, step: int) -> Manifest:
        name = folder_of(Path(), step).name
        manifest = decode(self._place.read(f"{name}/{MANIFEST_NAME}"), name)
        if manifest.step != step:
            raise DamagedError(f"belongs to step {manifest.step}", field="manifest", value=name)
        return manifest

    def _digest(self, step: int) -> str | None:
        """Of the manifest of a step, where there is one."""
        try:
            return digest_of(self._manifest(step))
        except (FileNotFoundError, DamagedError):
            return None

    def _send_files(self, folder: Path, manifest: Manifest) -> None:
        for entry in manifest.files[self._peers.rank :: self._peers.world]:
            _compare(entry, self._place.write(f"{folder.name}/{entry.name}", _pieces(folder / entry.name)))

    def _fetch_files(self, beside: Path, step: int) -> None:
        for entry in self._manifest(step).files[self._peers.rank :: self._peers.world]:
            content = self._place.read(f"{folder_of(Path(), step).name}/{entry.name}")
            _compare(entry, write_file(beside / entry.name, iter([memoryview(content)])))

    def _place_here(self, parent: Path, chain: list[int]) -> None:
        for step in chain:
            beside = _beside(parent, step)
            write_file(beside / MANIFEST_NAME, iter([memoryview(encode(self._manifest(step)))]))
            sync_folder(beside)
        for step in chain:
            rename_folder(_beside(parent, step), folder_of(parent, step))

    def _retire(self, kept: list[int]) -> None:
        for name in self._place.folders(""):
            if (step := step_of(name)) is not None and step not in kept:
                self._place.remove(f"{name}/{MANIFEST_NAME}")  # first: what is half gone is not there
                self._place.remove(name)


def _compare(entry: FileEntry, written: tuple[int, str]) -> None:
    """written: size and digest."""
    if written != (entry.bytes, entry.sha256):
        raise DamagedError("its content does not match its digest", field="checkpoint", value=entry.name)


def _beside(parent: Path, step: int) -> Path:
    return folder_of(parent, step).with_suffix(".partial")


def _begin(beside: Path) -> None:
    remove_folder(beside)
    beside.mkdir(parents=True)


def _pieces(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield memoryview(piece)


def _do_nothing() -> None:
    pass
