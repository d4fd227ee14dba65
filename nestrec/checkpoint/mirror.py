"""Mirrors checkpoints to a second location (any fsspec URL).

Each saved checkpoint is uploaded. A run without local checkpoints, for example after a move to another machine,
downloads the latest one. The manifest is written last, so a checkpoint without a manifest is incomplete. The ranks
share uploads and downloads, and every file is verified against its SHA-256 digest in both directions.
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
    corrupt_file_error,
    digest_of,
    encode,
    folder_of,
    manifest_in,
    read_chain,
    step_of,
)

_BLOCK_BYTES = 16 << 20
FIELD = "training.checkpoint_mirror"


@dataclass(frozen=True, slots=True)
class Copy:
    """A checkpoint in the mirror."""

    step: int
    """Number of training steps completed."""
    digest: str | None
    """Digest of its manifest; None if the manifest is missing or corrupt."""
    state: dict[str, Any] | None
    """JSON state of the checkpoint; None if it is corrupt."""
    problem: str
    """Description of what is corrupt; empty if the state could be read."""


class CheckpointMirror:
    """Mirror of the checkpoints of one run. Collective: every rank must make the same calls in the same order."""

    def __init__(self, address: str, peers: CheckpointGroup):
        self.address = address
        self._peers = peers

    @cached_property
    def _storage(self) -> Storage:
        """Storage at the address.

        It is opened at first use: reading the weights of a run folder must not require the storage's packages.
        """
        return storage_of(self.address)

    @cached_property
    def _reads(self) -> VerifiedReads:
        return VerifiedReads(RetriedReads(self._storage), corrupt_file_error)

    def steps(self) -> list[int]:
        """Return the steps in the mirror in order, including corrupt checkpoints."""
        return self._peers.run_on_first_rank(self._steps, f"{self.address} could not be listed")

    def copies(self) -> list[Copy]:
        """Return the checkpoints in the mirror in order of step. Not collective.

        Raises:
            UserError: The storage is not responding, which must not be mistaken for a mirror without checkpoints.
        """
        with _raising_user_error(self.address):
            return [self._copy(step) for step in self._steps()]

    def upload(self, path: Path, retained_steps: list[int]) -> None:
        """Upload a checkpoint and its missing bases, then delete the other checkpoints of the mirror.

        Args:
            path: Folder of the checkpoint.
            retained_steps: Steps that are not deleted.

        Raises:
            CheckpointSaveError: A rank could not upload; raised on all ranks.
        """
        problem = f"{path.name} could not be uploaded to {self.address}"
        for folder, manifest in reversed(read_chain(path)):
            if self._peers.run_on_first_rank(partial(self._digest, manifest.step), problem) == digest_of(manifest):
                continue
            self._peers.run_on_first_rank(partial(self._storage.remove, folder.name), problem)
            self._peers.run_on_all_ranks(partial(self._upload_files, folder, manifest), problem)
            fail_point("checkpoint.before_sent_manifest")
            self._peers.run_on_first_rank(
                partial(self._storage.replace, f"{folder.name}/{MANIFEST_NAME}", encode(manifest)), problem
            )
        self._peers.run_on_first_rank(partial(self._delete_others, retained_steps), problem)

    def download(self, parent: Path, step: int) -> str | None:
        """Download a checkpoint and its bases to a folder.

        Returns:
            A description of what is corrupt, or None if all files are intact.

        Raises:
            CheckpointSaveError: The storage or the folder failed, which says nothing about the checkpoint; raised on
                all ranks.
        """
        problem = f"step {step} could not be downloaded from {self.address}"
        local = LocalStorage(parent)
        chain, corruption = self._peers.run_on_first_rank(partial(self._read_chain_or_problem, step), problem)
        for each in chain:
            self._peers.run_on_first_rank(partial(local.remove, _partial(each)), problem)
            problems = self._peers.run_on_all_ranks(partial(self._download_files, local, each), problem)
            corruption = next((text for text in problems if text is not None), None)
            fail_point("checkpoint.after_fetched")
            if corruption is not None:
                break
        if corruption is not None:
            self._peers.run_on_first_rank(partial(_discard, local, chain), problem)
            return corruption
        # Commit only when all are downloaded: a folder with any checkpoint is not filled from the mirror again.
        self._peers.run_on_first_rank(partial(self._commit_local, local, chain), problem)
        return None

    def _steps(self) -> list[int]:
        folders = RetriedReads(self._storage).list_folders("")
        steps = sorted(step for name in folders if (step := step_of(name)) is not None)
        complete = [step for step in steps if self._has_manifest(step)]
        # A kill during the first upload leaves one folder without a manifest, which does not count. It cannot leave
        # several folders without any manifest: then the manifests were lost, and the steps count as corrupt.
        return complete if complete or len(steps) < 2 else steps

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

    def _read_chain_or_problem(self, step: int) -> tuple[list[int], str | None]:
        """Return the step and those of its bases, oldest first, and a description of what is corrupt or None."""
        try:
            return [manifest.step for manifest in reversed(chain_in(self._reads, _name(step)))], None
        except CorruptFileError as error:
            return [], str(error)

    def _digest(self, step: int) -> str | None:
        """Return the digest of the manifest of a step, or None if there is no valid manifest."""
        try:
            return digest_of(manifest_in(self._reads, _name(step)))
        except CorruptFileError:
            return None

    def _upload_files(self, folder: Path, manifest: Manifest) -> None:
        for entry in manifest.files[self._peers.rank :: self._peers.world]:
            _compare(entry, self._storage.write(f"{folder.name}/{entry.name}", _read_blocks(folder / entry.name)))

    def _download_files(self, local: LocalStorage, step: int) -> str | None:
        """Download this rank's share of the files; return a description of what is corrupt, or None."""
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

    def _delete_others(self, retained_steps: list[int]) -> None:
        for name in self._storage.list_folders(""):
            if (step := step_of(name)) is not None and step not in retained_steps:
                self._storage.remove(f"{name}/{MANIFEST_NAME}")  # first, so that a partial deletion is not visible
                self._storage.remove(name)


def _compare(entry: FileEntry, written: tuple[int, str]) -> None:
    """Raise a CorruptFileError if the size and digest of the written content differ from the entry."""
    if (problem := mismatch(entry, *written)) is not None:
        raise corrupt_file_error(entry.name, problem)


def _name(step: int) -> str:
    return folder_of(Path(), step).name


def _partial(step: int) -> str:
    return f"{_name(step)}.partial"


def _discard(local: LocalStorage, chain: list[int]) -> None:
    for step in chain:
        local.remove(_partial(step))


def _read_blocks(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield memoryview(block)


def corrupt_mirror_error(address: str, problems: Mapping[int, str]) -> CorruptFileError:
    """Return the error for a mirror without any intact checkpoint, from its problems by step."""
    steps = ", ".join(map(str, sorted(problems)))
    step, problem = next(iter(problems.items()))
    return CorruptFileError(
        f"all checkpoints in the mirror are corrupt (steps {steps}); step {step}: {problem}",
        option=FIELD,
        value=address,
        remedy="restore the corrupt files; or, to start over, set another address or move these checkpoints away",
    )


def read_at(address: str, name: str) -> bytes | None:
    """Return the content of a file in the mirror, or None if it does not exist.

    Raises:
        UserError: The storage is not responding.
    """
    with _raising_user_error(address):
        try:
            return bytes(RetriedReads(storage_of(address)).read(name))
        except FileNotFoundError:
            return None


@contextlib.contextmanager
def _raising_user_error(address: str) -> Iterator[None]:
    """Raise a `UserError` if the storage cannot be read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # some fsspec file systems raise their own exception types
        raise UserError(
            f"the storage cannot be read: {type(error).__name__}: {error}",
            option=FIELD,
            value=address,
            remedy="restart when the storage is available; nothing was changed there",
        ) from error
