"""Saves, restores and retains the checkpoints of a run; a checkpoint is either complete or not visible.

A save writes `step-N.partial/`, flushes every file, writes the manifest last and commits by renaming the folder (atomic
write). Every rank writes its own files to the shared folder; rank 0 writes the manifest and renames the folder.
"""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nestrec.artifacts.atomic_files import link_files, remove_folder, rename_folder, write_file
from nestrec.artifacts.delta import to_delete
from nestrec.artifacts.manifest import FileEntry
from nestrec.artifacts.writer_group import BackgroundWorker, CheckpointGroup, CheckpointSaveError
from nestrec.base.config import to_plain
from nestrec.base.config_values import from_plain
from nestrec.base.errors import CorruptFileError, NonFiniteError, UserError, require
from nestrec.base.failpoints import fail_point
from nestrec.base.files import fsync_path
from nestrec.checkpoint.checkpoint_content import RankCheckpoint
from nestrec.checkpoint.checkpoint_manifest import (
    MANIFEST_NAME,
    BaseCheckpoint,
    Manifest,
    committed_steps,
    digest_of,
    encode,
    file_problems,
    files_of,
    folder_of,
    leftovers,
    read_chain,
    read_manifest,
    verify,
)
from nestrec.checkpoint.checkpoint_writer import can_merge, merge_increments, write_files
from nestrec.checkpoint.loaded_checkpoint import LoadedCheckpoint
from nestrec.checkpoint.mirror import CheckpointMirror, Copy, corrupt_mirror_error

IDENTITY = "identity"
"""Name in the state of a checkpoint under which callers store the identity of the run."""
NOTED_BYTES = 1 << 30
"""Size from which the duration of a save or restore is reported, in bytes."""
Report = Callable[[str], None]
_LOG = logging.getLogger(__name__)


class CheckpointManager:
    """Checkpoints in one folder. With several ranks it is collective: all ranks make the same calls in the same order.

    Args:
        folder: Folder of the checkpoints, shared by all ranks.
        keep: Number of checkpoints to retain.
        max_deltas: Maximum number of successive incremental saves; 0 makes every save a full one.
        peers: Ranks that save together.
        report: Called with warnings.
        note: Called with the size and duration of large saves and restores.
        address: Mirror of the checkpoints, any fsspec URL. If the folder has no checkpoint, the latest one is
            downloaded from it.
        sibling: Manager of other checkpoints whose latest one is uploaded to its own mirror with every save.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int = 3,
        max_deltas: int = 0,
        peers: CheckpointGroup | None = None,
        report: Report = _LOG.warning,
        note: Report = _LOG.info,
        address: str = "",
        sibling: "CheckpointManager | None" = None,
    ):
        require(keep >= 1, "must be at least 1", option="keep", value=keep, remedy="set keep to 1 or more")
        self._folder = Path(folder)
        self._keep = keep
        self._max_deltas = max_deltas
        self._peers = peers or CheckpointGroup()
        self._report = report if self._peers.is_first else _ignore_message
        self._note = note if self._peers.is_first else _ignore_message
        self._mirror = CheckpointMirror(address, self._peers) if address else None
        self._sibling = sibling
        self._background = BackgroundWorker()
        self._base: int | None = None
        self._num_deltas = 0

    def save(self, step: int, content: RankCheckpoint, *, link_to: "CheckpointManager | None" = None) -> Path:
        """Write the checkpoint of a step and return its folder. Collective.

        The state after a step is a function of the run. So a step that is already saved, is complete and has the same
        identity in its state is not written again.

        Args:
            step: Number of training steps completed.
            content: This rank's part of the checkpoint.
            link_to: Other checkpoint folder in which a full checkpoint is also stored, by hard links, before it is
                committed in this folder.

        Raises:
            CheckpointSaveError: A rank could not write; raised on all ranks.
            NonFiniteError: The content is not finite, so training could not be resumed from it.
        """
        self._wait_for(content)
        return self._save(step, content, link_to)

    def save_async(
        self, step: int, content: RankCheckpoint, *, is_copied: bool = False, link_to: "CheckpointManager | None" = None
    ) -> None:
        """Copy the content to host memory, then write it in the background, at most one save at a time.

        An error of the background save is raised by the next call of `save`, `save_async`, `next_base_step`, `wait` or
        `close`.

        Args:
            step: Number of training steps completed.
            content: This rank's part of the checkpoint.
            is_copied: Whether later steps cannot change the content, so that no copy is needed.
            link_to: See `save`.
        """
        self._wait_for(content)
        safe = content if is_copied else content.copy()
        self._background.start(lambda: self._save(step, safe, link_to))

    def _wait_for(self, content: RankCheckpoint) -> None:
        """Wait for the background save; if it has failed, close the new content unread."""
        try:
            self._background.join()
        except BaseException:
            content.close()
            raise

    def wait(self) -> None:
        """Wait for the background save and raise its error, if any."""
        self._background.join()

    close = wait

    def steps(self) -> list[int]:
        """Return the steps with a committed checkpoint; the checkpoints may be corrupt."""
        return committed_steps(self._folder)

    def next_base_step(self) -> int | None:
        """Return the step since which the next save needs only the touched rows, or None if it needs all rows.

        After `max_deltas` incremental saves, the touched rows and the files of the chain are merged into a full
        checkpoint.
        """
        self._background.join()
        return self._base if self._max_deltas and self._num_deltas <= self._max_deltas else None

    def restore_latest(self, load_rows: Callable[[LoadedCheckpoint], object] | None = None) -> LoadedCheckpoint | None:
        """Restore the newest intact checkpoint, or return None if there are no checkpoints. Collective.

        A corrupt checkpoint is reported, and the one before it is restored. The next incremental save is based on the
        restored checkpoint; to read a checkpoint without resuming from it, use another `CheckpointManager`.

        Args:
            load_rows: Reads the rows of this rank from the checkpoint. The files are verified while they are read, so
                each is read only once; if a rank finds a corrupt file, all ranks continue with the checkpoint before
                it. Any other error must occur on all ranks. None: all files are verified first.

        Raises:
            CorruptFileError: There are checkpoints, but none is intact; the user decides whether to start over.
        """
        steps = self._steps_or_download()
        for step in reversed(steps):
            start_s = time.perf_counter()
            problems, restored = self._open(step, skip_row_content=load_rows is not None)
            if restored is not None and load_rows is not None:
                problems = self._load_rows(restored, load_rows)
                self._report_throughput(step, "rows read", sum(self._peers.gather(restored.bytes_read)), start_s)
            if restored is not None and not problems:
                return restored
            self._report(f"checkpoint of step {step} is corrupt and skipped: {_summary(problems)}")
        if steps:
            remedy = "start over in another run folder, or delete this one"
            raise CorruptFileError(
                "all checkpoints are corrupt", option="checkpoints", value=str(self._folder), remedy=remedy
            )
        return None

    def _steps_or_download(self) -> list[int]:
        """Return the steps in the folder; if it has none, download the newest intact checkpoint first.

        Raises:
            CorruptFileError: The mirror contains checkpoints, but none is intact.
        """
        steps: list[int] = self._peers.gather(self.steps())[0]
        if steps or self._mirror is None:
            return steps
        problems: dict[int, str] = {}
        for step in reversed(self._mirror.steps()):
            problem = self._mirror.download(self._folder, step)
            if problem is None:
                return self._peers.gather(self.steps())[0]  # type: ignore[no-any-return]
            self._report(f"step {step} could not be downloaded from {self._mirror.address}: {problem}")
            problems[step] = problem
        if problems:
            raise corrupt_mirror_error(self._mirror.address, problems)
        return []

    def _upload_latest(self) -> None:
        """Upload the latest checkpoint if it is not in the mirror, because an earlier upload has failed or was killed.

        The local checkpoint is complete, so a failed upload is only reported, and the next save retries it.
        """
        if self._mirror is None:
            return
        steps: list[int] = self._peers.gather(self.steps())[0]
        if not steps:
            return
        path = folder_of(self._folder, steps[-1])
        try:
            self._peers.run_on_all_ranks(lambda: len(read_chain(path)), f"{path.name} could not be uploaded")
            self._mirror.upload(path, steps)
        except CheckpointSaveError as error:
            self._report(error.problem)

    def restore(self, step: int) -> LoadedCheckpoint:
        """Restore the checkpoint of a step. Collective.

        Raises:
            UserError: There is no checkpoint of this step.
            CorruptFileError: The checkpoint is corrupt.
        """
        if step not in self._peers.gather(self.steps())[0]:
            remedy = f"choose one of the saved steps: {self.steps()}"
            raise UserError("there is no checkpoint of this step", option="step", value=step, remedy=remedy)
        problems, restored = self._open(step)
        if restored is None:
            remedy = "restore an earlier step"
            raise CorruptFileError(_summary(problems), option="checkpoint of step", value=step, remedy=remedy)
        return restored

    def state(self, step: int) -> dict[str, Any] | None:
        """Return only the state of a checkpoint, or None if it is corrupt. Not collective."""
        path = folder_of(self._folder, step)
        try:
            manifest = read_manifest(path)
        except CorruptFileError:
            return None
        files = [(path, entry) for entry in manifest.files if entry.kind == "state"]
        return None if file_problems(files) else LoadedCheckpoint([(path, manifest)]).state

    def latest_state(self) -> dict[str, Any] | None:
        """Return the state of the newest checkpoint whose state can be read. Not collective.

        Reads the mirror if the folder has no checkpoints.
        """
        steps = self.steps()
        states = [self.state(step) for step in steps] if steps else [copy.state for copy in self.copies()]
        return next((state for state in reversed(states) if state is not None), None)

    def adopt(self, other: "CheckpointManager", step: int) -> bool:
        """Store the checkpoint of another folder here as well, by hard links, if it is intact and full.

        Returns:
            Whether it was stored.
        """
        source = folder_of(other._folder, step)

        def link() -> bool:
            if verify(source):
                return False
            manifest = read_manifest(source)
            if manifest.base is not None:
                return False
            partial = _partial(folder_of(self._folder, step))
            self._begin(partial)
            link_files(source, partial)
            self._commit_folder(manifest, partial)
            return True

        problem = f"the checkpoint of step {step} could not be stored in {self._folder}"
        return self._peers.run_on_first_rank(link, problem)

    def copies(self) -> list[Copy]:
        """Return the checkpoints in the mirror, in order of step. Not collective.

        Raises:
            UserError: The storage cannot be read.
        """
        return [] if self._mirror is None else self._mirror.copies()

    def has_digest(self, step: int, digest: str | None) -> bool:
        """Return whether the folder contains the step's checkpoint with this manifest digest. Not collective."""
        try:
            return digest is not None and digest_of(read_manifest(folder_of(self._folder, step))) == digest
        except CorruptFileError:
            return False

    def quarantine(self, step: int) -> None:
        """Quarantine a checkpoint: it is not restored any more, but its files remain."""
        problem = f"the checkpoint of step {step} could not be quarantined"
        self._peers.run_on_first_rank(lambda: self._quarantine(folder_of(self._folder, step)), problem)

    def _load_rows(self, restored: LoadedCheckpoint, load_rows: Callable[[LoadedCheckpoint], object]) -> list[str]:
        """Read the rows and return the problems of all ranks."""
        problems = []
        try:
            load_rows(restored)
        except CorruptFileError as error:
            problems = [str(error)]
        all_problems = self._unique(problems)
        if all_problems:
            self._base = None
        return all_problems

    def _unique(self, problems: list[str]) -> list[str]:
        return list(dict.fromkeys(itertools.chain(*self._peers.gather(problems))))

    def _open(self, step: int, *, skip_row_content: bool = False) -> tuple[list[str], LoadedCheckpoint | None]:
        """Verify a checkpoint, each rank a share of the files; return the problems or the checkpoint. Collective."""
        chain, problems = [], []
        try:
            chain = read_chain(folder_of(self._folder, step))
            problems = file_problems(
                files_of(chain)[self._peers.rank :: self._peers.world], skip_row_content=skip_row_content
            )
        except CorruptFileError as error:
            problems = [str(error)]
        all_problems = self._unique(problems)
        if all_problems:
            return all_problems, None
        self._base = step
        self._num_deltas = len(chain) - 1
        return [], LoadedCheckpoint(chain)

    def _save(self, step: int, content: RankCheckpoint, link_to: "CheckpointManager | None") -> Path:
        with contextlib.closing(content):
            path = self._save_open(step, content, link_to)
        for manager in dict.fromkeys(manager for manager in (self, link_to, self._sibling) if manager is not None):
            manager._upload_latest()
        return path

    def _save_open(self, step: int, content: RankCheckpoint, link_to: "CheckpointManager | None" = None) -> Path:
        target = folder_of(self._folder, step)
        base = self._base
        num_deltas = self._num_deltas
        if self._has(step, content):
            if link_to is not None:
                link_to._save_open(step, content)
            return target
        if link_to is not None and link_to._has(step, content):
            if self._peers.is_first:
                link_to._retire()
            link_to = None
        assert content.base in (None, base), "an incremental save must be based on the last checkpoint"
        assert content.base is None or link_to is None, (
            "an incremental checkpoint cannot be linked: its base is only here"
        )
        self._base = None  # after a failed save the next one must be full
        is_incremental = self._write(step, content, is_merging=num_deltas >= self._max_deltas, link_to=link_to)
        self._base = step
        self._num_deltas = num_deltas + 1 if is_incremental else 0
        return target

    def _has(self, step: int, content: RankCheckpoint) -> bool:
        """Return whether the step is already saved, intact and with the same identity. Collective."""
        if step not in self._peers.gather(self.steps())[0]:
            return False
        saved = self._open(step)[1]
        # Rank 0 writes the state, so its comparison decides.
        same = self._peers.gather(saved is not None and saved.state.get(IDENTITY) == content.state.get(IDENTITY))[0]
        return bool(same)

    def _write(
        self, step: int, content: RankCheckpoint, *, is_merging: bool, link_to: "CheckpointManager | None"
    ) -> bool:
        """Write and commit a checkpoint; return whether it is incremental."""
        target = folder_of(self._folder, step)
        partial = _partial(target)
        problem = f"the checkpoint of step {step} could not be written to {self._folder}"
        start_s = time.perf_counter()
        try:
            self._peers.run_on_first_rank(lambda: self._begin(partial), problem)
            written = self._peers.run_on_all_ranks(lambda: self._write_part(partial, content, is_merging), problem)
            base = written[0]["base"]
            entries = [from_plain(FileEntry, entry) for part in written for entry in part["files"]]
            tables = sorted({table for part in written for table in part["tables"]})
            self._peers.run_on_first_rank(
                lambda: self._commit(self._manifest(step, base, tables, entries), partial, link_to), problem
            )
        except (CheckpointSaveError, NonFiniteError):
            if self._peers.is_first:
                remove_folder(partial)
            raise
        self._report_throughput(step, "written", sum(entry.bytes for entry in entries), start_s)
        if self._peers.is_first:
            for manager in [self] if link_to is None else [self, link_to]:
                manager._retire()
        return base is not None

    def _report_throughput(self, step: int, what: str, num_bytes: int, start_s: float) -> None:
        seconds = time.perf_counter() - start_s
        if num_bytes >= NOTED_BYTES:
            rate = num_bytes / seconds / 1e9
            self._note(
                f"checkpoint of step {step}: {num_bytes / 1e9:.2f} GB {what} by {self._peers.world} ranks "
                f"in {seconds:.1f} s ({rate:.2f} GB/s)"
            )

    def _begin(self, partial: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in leftovers(self._folder):
            remove_folder(path)
        partial.mkdir()

    def _write_part(self, partial: Path, content: RankCheckpoint, is_merging: bool) -> dict[str, Any]:
        """Write the files of this rank; return plain data for the manifest."""
        shard = content.shard or (self._peers.rank, self._peers.world)
        if is_merging and content.base is not None:
            chain = read_chain(folder_of(self._folder, content.base))
            content = merge_increments(content, chain, shard) if can_merge(chain, shard[1]) else content
        files = write_files(partial, content, self._peers)
        return {"tables": list(content.tables), "base": content.base, "files": to_plain(files)}

    def _manifest(self, step: int, base_step: int | None, tables: list[str], entries: list[FileEntry]) -> Manifest:
        base = None
        if base_step is not None:
            base = BaseCheckpoint(step=base_step, digest=digest_of(read_manifest(folder_of(self._folder, base_step))))
        files = tuple(sorted(entries, key=lambda entry: entry.name))
        return Manifest(step=step, num_ranks=self._peers.world, files=files, tables=tuple(tables), base=base)

    def _commit(self, manifest: Manifest, partial: Path, link_to: "CheckpointManager | None") -> None:
        fail_point("checkpoint.before_manifest")
        write_file(partial / MANIFEST_NAME, iter([memoryview(encode(manifest))]))
        fsync_path(partial)
        if link_to is not None:
            linked_partial = _partial(folder_of(link_to._folder, manifest.step))
            link_to._begin(linked_partial)
            link_files(partial, linked_partial)
            link_to._commit_folder(manifest, linked_partial)
            fail_point("checkpoint.after_linked")
        self._commit_folder(manifest, partial)

    def _commit_folder(self, manifest: Manifest, partial: Path) -> None:
        # Existing checkpoints of later steps are corrupt or from another branch of the run: this run must not resume
        # from them.
        for step in committed_steps(self._folder):
            if step >= manifest.step:
                self._quarantine(folder_of(self._folder, step))
        fail_point("checkpoint.before_rename")
        rename_folder(partial, folder_of(self._folder, manifest.step))
        fail_point("checkpoint.after_rename")

    def _quarantine(self, path: Path) -> None:
        renamed = path.with_name(path.name + ".abandoned")
        remove_folder(renamed)
        rename_folder(path, renamed)
        self._report(f"{path.name} is corrupt or from another branch of the run; it was renamed to {renamed.name}")

    def _retire(self) -> None:
        """Delete the checkpoints that are not retained.

        A failure only costs disk space, so it is reported and not raised.
        """
        steps = committed_steps(self._folder)
        try:
            for step in to_delete(steps, steps[-self._keep :], self._base_of):
                path = folder_of(self._folder, step)
                deleted = path.with_name(path.name + ".deleted")
                rename_folder(path, deleted)
                fail_point("checkpoint.during_retention")
                remove_folder(deleted)
        except OSError as error:
            self._report(f"an old checkpoint could not be deleted: {error}")

    def _base_of(self, step: int) -> int | None:
        base = read_manifest(folder_of(self._folder, step)).base
        return None if base is None else base.step


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _summary(problems: list[str], limit: int = 3) -> str:
    more = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + more


def _ignore_message(message: str) -> None:
    pass
