"""The checkpoints of a run: saved as a whole or not at all, restored from the newest that is whole.

A save writes `step-N.partial/`, flushes every file, writes the manifest last and commits by renaming the folder. Every
rank writes its own files into the shared folder; rank 0 writes the manifest and renames.
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
from nestrec.checkpoint.checkpoint_writer import can_merge, merged, write_files
from nestrec.checkpoint.loaded_checkpoint import LoadedCheckpoint
from nestrec.checkpoint.mirror import CheckpointMirror, Copy, damaged_elsewhere

IDENTITY = "identity"
"""Under this name the state of a checkpoint may say whose it is."""
NOTED_BYTES = 1 << 30
"""What takes as much is told."""
Report = Callable[[str], None]
_LOG = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and restores under one folder. With several ranks, all of them make the same calls in the same order."""

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
        beside: "CheckpointManager | None" = None,
    ):
        """`keep`: how many to retain. `max_deltas`: incremental saves in a row; 0 makes every save a full one.

        report: told of what is wrong. note: told what large ones take. address: a second place for them, any address of
        `fsspec`; they are taken from there where the folder has none. beside: others, whose newest is looked after in
        their second place with every save of these.
        """
        require(keep >= 1, "at least one checkpoint must be kept", option="keep", value=keep, remedy="give 1 or more")
        self._folder = Path(folder)
        self._keep = keep
        self._max_deltas = max_deltas
        self._peers = peers or CheckpointGroup()
        self._report = report if self._peers.is_first else _say_nothing
        self._note = note if self._peers.is_first else _say_nothing
        self._elsewhere = CheckpointMirror(address, self._peers) if address else None
        self._beside = beside
        self._background = BackgroundWorker()
        self._base: int | None = None
        self._num_deltas = 0

    def save(self, step: int, content: RankCheckpoint, *, also: "CheckpointManager | None" = None) -> Path:
        """Write the checkpoint of a step; `CheckpointSaveError` on all ranks when one of them cannot, `NonFiniteError`
        when it may not: what is not finite is no state to go on from.

        The state after a step is a function of the run, so a step that is saved already, is whole and names the same
        identity in its state is left as it is.

        also: where it is to be found as well, before it is here; a full checkpoint, whose files are shared.
        """
        self._wait_for(content)
        return self._save(step, content, also)

    def save_async(
        self, step: int, content: RankCheckpoint, *, is_copied: bool = False, also: "CheckpointManager | None" = None
    ) -> None:
        """Copy the content to host memory, then write it in the background, at most one save at a time.

        With `is_copied` the content is already safe from later changes. An error of the writing is raised by the next
        call of `save`, `save_async`, `base_for_next`, `wait` or `close`.
        """
        self._wait_for(content)
        safe = content if is_copied else content.copied()
        self._background.start(lambda: self._save(step, safe, also))

    def _wait_for(self, content: RankCheckpoint) -> None:
        """Until a save in the background is done; where that has failed, nothing is read of what comes after it."""
        try:
            self._background.join()
        except BaseException:
            content.close()
            raise

    def wait(self) -> None:
        """Wait for a save in the background and raise its error, if any."""
        self._background.join()

    close = wait

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint; they may be damaged."""
        return committed_steps(self._folder)

    def base_for_next(self) -> int | None:
        """Step since which the next save needs only the touched rows, or None: it must give all rows.

        After `max_deltas` incremental saves the touched rows and the chain's files are merged into a full checkpoint.
        """
        self._background.join()
        return self._base if self._max_deltas and self._num_deltas <= self._max_deltas else None

    def restore_latest(self, take: Callable[[LoadedCheckpoint], object] | None = None) -> LoadedCheckpoint | None:
        """The newest checkpoint that is whole, or None where there is none at all.

        take: reads the rows that this rank wants. They are compared with their digests on the way, so every file is
        read once; where a rank finds damage, all go on to the checkpoint before it. Without it every file is verified
        first. Any other error must be one of all ranks.
        A damaged one is reported and the one before it is taken. `CorruptFileError` when there are checkpoints and
        none is whole: whether to start over is for the user to say. The next incremental save builds on what was
        restored; to look at a checkpoint without going on from it, use another `CheckpointManager`.
        """
        steps = self._steps_to_take()
        for step in reversed(steps):
            start_s = time.perf_counter()
            problems, restored = self._open(step, but_rows=take is not None)
            if restored is not None and take is not None:
                problems = self._taken(restored, take)
                self._tell(step, "rows read", sum(self._peers.gather(restored.bytes_read)), start_s)
            if restored is not None and not problems:
                return restored
            self._report(f"checkpoint of step {step} is damaged and skipped: {_summary(problems)}")
        if steps:
            remedy = "start over in another run folder, or delete this one"
            raise CorruptFileError(
                "no checkpoint is whole", option="checkpoints", value=str(self._folder), remedy=remedy
            )
        return None

    def _steps_to_take(self) -> list[int]:
        """Returns the steps of the folder; if it has none, the newest whole copy is fetched from the address first.

        Raises:
            CorruptFileError: there are copies at the address, and none is whole.
        """
        steps: list[int] = self._peers.gather(self.steps())[0]
        if steps or self._elsewhere is None:
            return steps
        problems: dict[int, str] = {}
        for step in reversed(self._elsewhere.steps()):
            problem = self._elsewhere.fetch(self._folder, step)
            if problem is None:
                return self._peers.gather(self.steps())[0]  # type: ignore[no-any-return]
            self._report(f"step {step} could not be taken from {self._elsewhere.address}: {problem}")
            problems[step] = problem
        if problems:
            raise damaged_elsewhere(self._elsewhere.address, problems)
        return []

    def _send_newest(self) -> None:
        """A copy for the second place, where it has none: an earlier start may have ended, or failed, before that.

        What is here is whole: a failure there is told, and the next save goes on.
        """
        if self._elsewhere is None:
            return
        steps: list[int] = self._peers.gather(self.steps())[0]
        if not steps:
            return
        path = folder_of(self._folder, steps[-1])
        try:
            self._peers.agree(lambda: len(read_chain(path)), f"{path.name} could not be copied")
            self._elsewhere.send(path, steps)
        except CheckpointSaveError as error:
            self._report(error.problem)

    def restore(self, step: int) -> LoadedCheckpoint:
        """The checkpoint of a step; `CorruptFileError` when it is not whole."""
        if step not in self._peers.gather(self.steps())[0]:
            remedy = f"steps with a checkpoint: {self.steps()}"
            raise UserError("no checkpoint of this step", option="step", value=step, remedy=remedy)
        problems, restored = self._open(step)
        if restored is None:
            remedy = "take an earlier step"
            raise CorruptFileError(_summary(problems), option="checkpoint of step", value=step, remedy=remedy)
        return restored

    def state(self, step: int) -> dict[str, Any] | None:
        """The state of a checkpoint alone, or none where that is damaged. Local."""
        path = folder_of(self._folder, step)
        try:
            manifest = read_manifest(path)
        except CorruptFileError:
            return None
        files = [(path, entry) for entry in manifest.files if entry.kind == "state"]
        return None if file_problems(files) else LoadedCheckpoint([(path, manifest)]).state

    def newest_state(self) -> dict[str, Any] | None:
        """Returns the state of the newest checkpoint whose state can be read: of the folder, or of the copies at the
        address if the folder has none. Local."""
        steps = self.steps()
        states = [self.state(step) for step in steps] if steps else [copy.state for copy in self.copies()]
        return next((state for state in reversed(states) if state is not None), None)

    def adopt(self, other: "CheckpointManager", step: int) -> bool:
        """Store the checkpoint of another folder here as well, if it is whole and builds on no other one.

        Returns whether it was stored. The files are shared.
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
            self._place(manifest, partial)
            return True

        problem = f"the checkpoint of step {step} could not be stored in {self._folder}"
        return self._peers.on_first(link, problem)

    def copies(self) -> list[Copy]:
        """Returns the copies at the address, in the order of their steps. Local.

        Raises:
            UserError: the storage cannot be read.
        """
        return [] if self._elsewhere is None else self._elsewhere.copies()

    def has_digest(self, step: int, digest: str | None) -> bool:
        """Returns whether the folder holds the checkpoint of a step with this digest of its manifest. Local."""
        try:
            return digest is not None and digest_of(read_manifest(folder_of(self._folder, step))) == digest
        except CorruptFileError:
            return False

    def set_aside(self, step: int) -> None:
        """Take a checkpoint out of those that can be restored; its files stay."""
        problem = f"the checkpoint of step {step} could not be set aside"
        self._peers.on_first(lambda: self._set_aside(folder_of(self._folder, step)), problem)

    def _taken(self, restored: LoadedCheckpoint, take: Callable[[LoadedCheckpoint], object]) -> list[str]:
        """Problems that the ranks met while they read."""
        problems = []
        try:
            take(restored)
        except CorruptFileError as error:
            problems = [str(error)]
        found = self._unique(problems)
        if found:
            self._base = None
        return found

    def _unique(self, problems: list[str]) -> list[str]:
        return list(dict.fromkeys(itertools.chain(*self._peers.gather(problems))))

    def _open(self, step: int, *, but_rows: bool = False) -> tuple[list[str], LoadedCheckpoint | None]:
        """Verify together, each rank its share of the files; the problems, or the checkpoint."""
        chain, problems = [], []
        try:
            chain = read_chain(folder_of(self._folder, step))
            problems = file_problems(files_of(chain)[self._peers.rank :: self._peers.world], but_rows=but_rows)
        except CorruptFileError as error:
            problems = [str(error)]
        all_problems = self._unique(problems)
        if all_problems:
            return all_problems, None
        self._base = step
        self._num_deltas = len(chain) - 1
        return [], LoadedCheckpoint(chain)

    def _save(self, step: int, content: RankCheckpoint, also: "CheckpointManager | None") -> Path:
        with contextlib.closing(content):
            path = self._save_open(step, content, also)
        for place in dict.fromkeys(place for place in (self, also, self._beside) if place is not None):
            place._send_newest()
        return path

    def _save_open(self, step: int, content: RankCheckpoint, also: "CheckpointManager | None" = None) -> Path:
        target = folder_of(self._folder, step)
        base = self._base
        num_deltas = self._num_deltas
        if self._has(step, content):
            if also is not None:
                also._save_open(step, content)
            return target
        if also is not None and also._has(step, content):
            if self._peers.is_first:
                also._retire()
            also = None
        assert content.base in (None, base), "an incremental save builds on the last checkpoint"
        assert content.base is None or also is None, "what an incremental one builds on is not elsewhere"
        self._base = None  # after a failed save the next one must be full
        is_incremental = self._write(step, content, is_merging=num_deltas >= self._max_deltas, also=also)
        self._base = step
        self._num_deltas = num_deltas + 1 if is_incremental else 0
        return target

    def _has(self, step: int, content: RankCheckpoint) -> bool:
        """Whether the step is saved already, whole and of the same identity. Collective."""
        if step not in self._peers.gather(self.steps())[0]:
            return False
        saved = self._open(step)[1]
        # What the first rank says is what is written.
        same = self._peers.gather(saved is not None and saved.state.get(IDENTITY) == content.state.get(IDENTITY))[0]
        return bool(same)

    def _write(self, step: int, content: RankCheckpoint, *, is_merging: bool, also: "CheckpointManager | None") -> bool:
        """Write and commit; whether what was written is incremental."""
        target = folder_of(self._folder, step)
        partial = _partial(target)
        problem = f"the checkpoint of step {step} could not be written to {self._folder}"
        start_s = time.perf_counter()
        try:
            self._peers.on_first(lambda: self._begin(partial), problem)
            written = self._peers.agree(lambda: self._write_part(partial, content, is_merging), problem)
            base = written[0]["base"]
            entries = [from_plain(FileEntry, entry) for part in written for entry in part["files"]]
            tables = sorted({table for part in written for table in part["tables"]})
            self._peers.on_first(
                lambda: self._commit(self._manifest(step, base, tables, entries), partial, also), problem
            )
        except (CheckpointSaveError, NonFiniteError):
            if self._peers.is_first:
                remove_folder(partial)
            raise
        self._tell(step, "written", sum(entry.bytes for entry in entries), start_s)
        if self._peers.is_first:
            for place in [self] if also is None else [self, also]:
                place._retire()
        return base is not None

    def _tell(self, step: int, what: str, num_bytes: int, start_s: float) -> None:
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
        """Write this rank's files; plain data for the manifest."""
        shard = content.shard or (self._peers.rank, self._peers.world)
        if is_merging and content.base is not None:
            chain = read_chain(folder_of(self._folder, content.base))
            content = merged(content, chain, shard) if can_merge(chain, shard[1]) else content
        files = write_files(partial, content, self._peers)
        return {"tables": list(content.tables), "base": content.base, "files": to_plain(files)}

    def _manifest(self, step: int, base_step: int | None, tables: list[str], entries: list[FileEntry]) -> Manifest:
        base = None
        if base_step is not None:
            base = BaseCheckpoint(step=base_step, digest=digest_of(read_manifest(folder_of(self._folder, base_step))))
        files = tuple(sorted(entries, key=lambda entry: entry.name))
        return Manifest(step=step, num_ranks=self._peers.world, files=files, tables=tuple(tables), base=base)

    def _commit(self, manifest: Manifest, partial: Path, also: "CheckpointManager | None") -> None:
        fail_point("checkpoint.before_manifest")
        write_file(partial / MANIFEST_NAME, iter([memoryview(encode(manifest))]))
        fsync_path(partial)
        if also is not None:
            theirs = _partial(folder_of(also._folder, manifest.step))
            also._begin(theirs)
            link_files(partial, theirs)
            also._place(manifest, theirs)
            fail_point("checkpoint.after_linked")
        self._place(manifest, partial)

    def _place(self, manifest: Manifest, partial: Path) -> None:
        # Later steps are damaged or of another course of training: they must not be taken for this one's future.
        for step in committed_steps(self._folder):
            if step >= manifest.step:
                self._set_aside(folder_of(self._folder, step))
        fail_point("checkpoint.before_rename")
        rename_folder(partial, folder_of(self._folder, manifest.step))
        fail_point("checkpoint.after_rename")

    def _set_aside(self, path: Path) -> None:
        aside = path.with_name(path.name + ".abandoned")
        remove_folder(aside)
        rename_folder(path, aside)
        self._report(f"{path.name} is damaged or from another course of training; it is set aside as {aside.name}")

    def _retire(self) -> None:
        """Delete what need not be kept. A failure here costs disk space only, so it is reported and not raised."""
        steps = committed_steps(self._folder)
        try:
            for step in to_delete(steps, steps[-self._keep :], self._base_of):
                path = folder_of(self._folder, step)
                doomed = path.with_name(path.name + ".deleted")
                rename_folder(path, doomed)
                fail_point("checkpoint.during_retention")
                remove_folder(doomed)
        except OSError as error:
            self._report(f"an old checkpoint could not be deleted: {error}")

    def _base_of(self, step: int) -> int | None:
        base = read_manifest(folder_of(self._folder, step)).base
        return None if base is None else base.step


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _summary(problems: list[str], most: int = 3) -> str:
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more


def _say_nothing(message: str) -> None:
    pass
