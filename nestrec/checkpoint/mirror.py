"""Checkpoints in a second place, any address of `fsspec`: copied there as they are saved, and taken from there by a run
whose folder has none, such as one that goes on on another machine.

A checkpoint is there when its manifest is, which is written last. Each rank copies its share of the files, and takes
back its share; every file is compared with its digest on both ways.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from nestrec.artifacts.manifest import FileEntry, VerifiedReads, mismatch
from nestrec.artifacts.storage import LocalStorage, RetriedReads, Storage, storage_of
from nestrec.artifacts.writer_group import CheckpointGroup
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.base.failpoints import fail_point
from nestrec.checkpoint.checkpoint_manifest import (
    MANIFEST_NAME,
    Manifest,
    chain_in,
    damaged_file,
    digest_of,
    encode,
    folder_of,
    manifest_in,
    read_chain,
    step_of,
)

_PIECE_BYTES = 16 << 20
FIELD = "training.checkpoint_address"


@dataclass(frozen=True, slots=True)
class Copy:
    """A checkpoint at the address."""

    step: int
    digest: str | None
    """Digest of its manifest; None if that is missing or damaged."""
    state: dict[str, Any] | None
    """Its state; None if that is damaged."""
    problem: str
    """What is damaged; empty if the state could be read."""


class CheckpointMirror:
    """The second place. All ranks make the same calls in the same order."""

    def __init__(self, address: str, peers: CheckpointGroup):
        self.address = address
        self._peers = peers

    @cached_property
    def _storage(self) -> Storage:
        """Opened at first use: the weights in a run folder can be read without the packages that the address needs."""
        return storage_of(self.address)

    @cached_property
    def _reads(self) -> VerifiedReads:
        return VerifiedReads(RetriedReads(self._storage), damaged_file)

    def steps(self) -> list[int]:
        """Returns the steps of the copies, damaged ones included, in order."""
        return self._peers.on_first(self._steps, f"{self.address} could not be looked into")

    def copies(self) -> list[Copy]:
        """Returns the copies in the order of their steps. Local.

        Raises:
            UserError: the storage did not answer, which must not be mistaken for an address without checkpoints.
        """
        with _refusing(self.address):
            return [self._copy(step) for step in self._steps()]

    def send(self, path: Path, kept: list[int]) -> None:
        """Copy a checkpoint and what it builds on, as far as that is not there; then delete all but the kept steps.

        `CheckpointSaveError` on all ranks when one of them cannot.
        """
        problem = f"{path.name} could not be copied to {self.address}"
        for folder, manifest in reversed(read_chain(path)):
            if self._peers.on_first(partial(self._digest, manifest.step), problem) == digest_of(manifest):
                continue
            self._peers.on_first(partial(self._storage.remove, folder.name), problem)
            self._peers.agree(partial(self._send_files, folder, manifest), problem)
            fail_point("checkpoint.before_sent_manifest")
            self._peers.on_first(
                partial(self._storage.replace, f"{folder.name}/{MANIFEST_NAME}", encode(manifest)), problem
            )
        self._peers.on_first(partial(self._retire, kept), problem)

    def fetch(self, parent: Path, step: int) -> str | None:
        """Copy a checkpoint and what it builds on into a folder; returns what is damaged, or None if all is whole.

        `CheckpointSaveError` on all ranks if the storage or the folder fails: that says nothing about the checkpoint.
        """
        problem = f"step {step} could not be taken from {self.address}"
        local = LocalStorage(parent)
        chain, damage = self._peers.on_first(partial(self._chain_or_damage, step), problem)
        for each in chain:
            self._peers.on_first(partial(local.remove, _partial(each)), problem)
            found = self._peers.agree(partial(self._fetch_files, local, each), problem)
            damage = next((text for text in found if text is not None), None)
            fail_point("checkpoint.after_fetched")
            if damage is not None:
                break
        if damage is not None:
            self._peers.on_first(partial(_discard, local, chain), problem)
            return damage
        # Only now: a folder that has any checkpoint is not filled from the address again.
        self._peers.on_first(partial(self._commit_local, local, chain), problem)
        return None

    def _steps(self) -> list[int]:
        folders = RetriedReads(self._storage).list_folders("")
        steps = sorted(step for name in folders if (step := step_of(name)) is not None)
        sent = [step for step in steps if self._has_manifest(step)]
        # A kill while the first copy is sent leaves one folder without a manifest, which does not count. It cannot
        # leave several and none with a manifest: those have lost theirs.
        return sent if sent or len(steps) < 2 else steps

    def _has_manifest(self, step: int) -> bool:
        try:
            RetriedReads(self._storage).read(f"{_name(step)}/{MANIFEST_NAME}")
        except FileNotFoundError:
            return False
        except IsADirectoryError:
            return True
        return True

    def _copy(self, step: int) -> Copy:
        digest = None
        try:
            manifest = manifest_in(self._reads, _name(step))
            digest = digest_of(manifest)
            (entry,) = (entry for entry in manifest.files if entry.kind == "state")
            content = self._reads.content(_name(step), entry)
        except CorruptFileError as error:
            return Copy(step, digest, None, str(error))
        return Copy(step, digest, json.loads(content), "")

    def _chain_or_damage(self, step: int) -> tuple[list[int], str | None]:
        """Returns the step and those that it builds on, oldest first, and what is damaged."""
        try:
            return [manifest.step for manifest in reversed(chain_in(self._reads, _name(step)))], None
        except CorruptFileError as error:
            return [], str(error)

    def _digest(self, step: int) -> str | None:
        """Of the manifest of a step, where there is one."""
        try:
            return digest_of(manifest_in(self._reads, _name(step)))
        except CorruptFileError:
            return None

    def _send_files(self, folder: Path, manifest: Manifest) -> None:
        for entry in manifest.files[self._peers.rank :: self._peers.world]:
            _compare(entry, self._storage.write(f"{folder.name}/{entry.name}", _pieces(folder / entry.name)))

    def _fetch_files(self, local: LocalStorage, step: int) -> str | None:
        """Copy this rank's share of the files; returns what is damaged."""
        try:
            manifest = manifest_in(self._reads, _name(step))
            for entry in manifest.files[self._peers.rank :: self._peers.world]:
                content = self._reads.read(f"{_name(step)}/{entry.name}")
                _compare(entry, local.write(f"{_partial(step)}/{entry.name}", iter([memoryview(content)])))
        except CorruptFileError as error:
            return str(error)
        return None

    def _commit_local(self, local: LocalStorage, chain: list[int]) -> None:
        for step in chain:
            content = encode(manifest_in(self._reads, _name(step)))
            local.write(f"{_partial(step)}/{MANIFEST_NAME}", iter([memoryview(content)]))
        for step in chain:
            local.commit_folder(_partial(step), _name(step))

    def _retire(self, kept: list[int]) -> None:
        for name in self._storage.list_folders(""):
            if (step := step_of(name)) is not None and step not in kept:
                self._storage.remove(f"{name}/{MANIFEST_NAME}")  # first: what is half gone is not there
                self._storage.remove(name)


def _compare(entry: FileEntry, written: tuple[int, str]) -> None:
    """written: size and digest."""
    if (problem := mismatch(entry, *written)) is not None:
        raise damaged_file(entry.name, problem)


def _name(step: int) -> str:
    return folder_of(Path(), step).name


def _partial(step: int) -> str:
    return f"{_name(step)}.partial"


def _discard(local: LocalStorage, chain: list[int]) -> None:
    for step in chain:
        local.remove(_partial(step))


def _pieces(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield memoryview(piece)


def damaged_elsewhere(address: str, problems: Mapping[int, str]) -> CorruptFileError:
    """Returns the error for an address of which no copy can be used. problems: by step."""
    steps = ", ".join(map(str, sorted(problems)))
    step, problem = next(iter(problems.items()))
    return CorruptFileError(
        f"none of the checkpoints there is whole (steps {steps}); step {step}: {problem}",
        option=FIELD,
        value=address,
        remedy="restore the damaged files; or, to start over, name another address or move these checkpoints away",
    )


def read_at(address: str, name: str) -> bytes | None:
    """Returns the content of a file at the address, or None if it does not exist; a `UserError` as for `copies`."""
    with _refusing(address):
        try:
            return bytes(RetriedReads(storage_of(address)).read(name))
        except FileNotFoundError:
            return None


@contextlib.contextmanager
def _refusing(address: str) -> Iterator[None]:
    """Raise a `UserError` if the storage cannot be read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # some file systems of fsspec raise errors of their own
        raise UserError(
            f"cannot be read: {type(error).__name__}: {error}",
            option=FIELD,
            value=address,
            remedy="start again when the storage answers; nothing was changed there",
        ) from error
