"""Batch inference: writes recommendations or embeddings of many users to files; jobs resume after a kill.

A job is split into parts of `part_users` users. Each part is a file that is written atomically. Parts are assigned to
ranks round-robin, and a part that exists is not computed again. When all parts exist, the first rank concatenates them
in order, so that the output is bitwise identical for any number of ranks and restarts.

The users of a job are all users of a dataset, those of a list, or those of a Parquet file with their histories.
"""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from nestrec.base.config import config, to_plain
from nestrec.base.config_values import Count, from_plain
from nestrec.base.errors import CorruptFileError, UserError, did_you_mean, require
from nestrec.base.failpoints import fail_point
from nestrec.base.files import check_file, raise_if_unwritable, remove_partials, replaced_file, write_atomic
from nestrec.base.renamed_fields import with_present_names
from nestrec.data.dataset import Dataset
from nestrec.distributed import Topology
from nestrec.distributed.collectives import barrier
from nestrec.exporters.dataset_users import NO_LIMITS, DatasetUsers, ResolvedUser, UserColumns
from nestrec.inference.request_parsing import plain_values
from nestrec.inference.users_file import FileUsers
from nestrec.serving.core.request_limits import BadRequestError, MissingInputError
from nestrec.serving.engine.reference_runner import user_queries
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver
from nestrec.serving.model.model_adapter import make_adapter
from nestrec.serving.model.request_inputs import Candidates, sorted_unique
from nestrec.serving.model.retrieval_adapter import RetrievalAdapter
from nestrec.serving.model.servable import Servable

_MAX_SUGGESTED = 1000
"""Maximum number of category values among which an error suggests a similar one."""


class UserSource(Protocol):
    """Users in a fixed order."""

    @property
    def digest(self) -> str:
        """Digest of the users and their histories, by which a resumed job recognizes the same input."""
        ...

    def __len__(self) -> int: ...

    def read(self, first: int, end: int) -> UserColumns:
        """Return the users `first` to `end - 1`."""
        ...


def open_users(
    users: Path | str, servable: Servable, data: Path | str | None, context: Mapping[str, Any]
) -> UserSource:
    """Open the users of a job.

    Args:
        users: `all`, a text file with one user id per line, or a Parquet file (columns: see
            `nestrec.inference.users_file`).
        servable: Model that reads them.
        data: Folder of the dataset of the users, unless they are in a Parquet file.
        context: Values of the context features of the event to predict, for all users, by name. Columns of a Parquet
            file have precedence.

    Raises:
        UserError: A file does not exist, users are unknown, or something that the model reads is missing.
    """
    value: Any = users
    if not isinstance(value, str | Path):
        remedy = 'pass "all", the path of a text file with one user id per line, or of a Parquet file with histories'
        raise UserError("must be a path", option="users", value=value, remedy=remedy)
    users = str(users)
    if users != "all" and not Path(users).is_file():
        remedy = "pass all, a text file with one user id per line, or a Parquet file with user, items and times_ms"
        raise UserError("the file does not exist", option="users", value=users, remedy=remedy)
    _check_context(context, servable)
    if users.endswith(".parquet"):
        return FileUsers(Path(users), servable, context)
    if data is None:
        remedy = "set --data to the dataset of the users, or pass a Parquet file of users with their histories"
        raise UserError("the dataset of the users is not known", option="users", value=users, remedy=remedy)
    require(isinstance(data, str | Path), "must be a path", option="data", value=data, remedy="pass a dataset folder")
    return _DatasetUserSource(Dataset.open(data), servable, None if users == "all" else Path(users), context)


class _DatasetUserSource:
    def __init__(self, dataset: Dataset, servable: Servable, user_list: Path | None, context: Mapping[str, Any]):
        self._dataset = dataset
        self._users = DatasetUsers(dataset, servable, context)
        self._indices = np.arange(dataset.num_samples)
        if user_list is not None:
            keys = [line for line in _read_text(user_list).split("\n") if line]
            known = {key: index for index, key in enumerate(dataset.user_keys(self._indices))}
            unknown = [key for key in keys if key not in known]
            if unknown:
                remedy = "list one user id per line; for users with their own histories, pass a .parquet file"
                raise UserError(
                    "the dataset does not have these users", option="users", value=unknown[:10], remedy=remedy
                )
            self._indices = np.array([known[key] for key in keys], np.int64)
        try:
            self.read(0, 0)
        except MissingInputError as error:  # a context feature: a dataset does not contain the event to predict
            name = error.field.partition(".")[2]
            remedy = f"set --{error.field}, or export the model with --defaults.features.{name}"
            raise UserError(error.message, option=error.field, value=None, remedy=remedy) from None

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._dataset.digest.encode() + self._indices.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, first: int, end: int) -> UserColumns:
        return self._users.read(self._indices[first:end])


def _check_context(context: Mapping[str, Any], servable: Servable) -> None:
    """Check the context values before the job starts, because an error in them would affect all results."""
    for name, value in context.items():
        field = f"context.{name}"
        known = servable.context_features
        if name not in known:
            remedy = did_you_mean(name, known) if known else "remove it: the model has no context features"
            raise UserError("the model does not read this feature", option=field, value=value, remedy=remedy)
        resolver = RequestResolver(servable, NO_LIMITS, RequestNotes())
        column = servable.event_features[name]
        try:
            resolver.values(value, 1, column, field, is_each=False)
        except BadRequestError as error:
            raise UserError(
                error.message, option=field, value=value, remedy="use the type of the request field"
            ) from None
        for note in resolver.notes.to_response()["unknown_ids"]:
            is_short = column.keys is not None and len(column.keys) < _MAX_SUGGESTED
            remedy = did_you_mean(str(note["ids"][0]), column.keys or ()) if is_short else "use a value of the log"
            remedy += "; for an unknown value, use none"
            raise UserError("the model does not know this value", option=field, value=value, remedy=remedy)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        remedy = "write a UTF-8 text file with one user id per line, or pass a .parquet file"
        raise UserError("the file is not UTF-8 text", option="users", value=str(path), remedy=remedy) from None


T = TypeVar("T")
JOB_FILE = "job.json"
_DIGESTS = ("model", "users")
"""Fields of a job that errors show without their value, because they are digests."""
_PARQUET = ("", ".parquet", ".pq")
_USUAL_FIELDS = 32
"""Number of fields per event up to which a batch has its full size; with more fields, batches have fewer events."""
_NO_ITEMS = np.zeros(0, np.int64)
_BYTES = torch.uint8
_NO_RESULT = _NO_ITEMS, np.zeros((0, 1), np.float32)


@config
class BatchJobConfig:
    """Options of a batch inference job."""

    k: Count = 100
    """Maximum number of recommended items per user."""
    exclude_seen: bool = True
    """Do not recommend items of the user's history."""
    part_users: Count = 4096
    """Number of users per part: the most users that each rank computes again after a kill."""
    max_batch_tokens: Count = 65_536
    """Maximum number of events per batch."""
    history_stride: Count | None = None
    """Number of oldest events that are dropped at once when a history exceeds the maximum length of the model; none
    uses the value of the evaluation, as a server does."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """Values of the context features of the event to predict, by name, for all users."""


class BatchRecommender:
    """Batch inference job of a retrieval model: writes recommendations or embeddings to files. Collective.

    Args:
        servable: The model.
        cfg: Options of the job.
        topology: Ranks that share the work; None uses this process only.
        data: Folder of the dataset of the users; a call can name another one.

    Raises:
        UserError: The model is not a retrieval model, or an option is invalid.
    """

    def __init__(
        self,
        servable: Servable,
        cfg: BatchJobConfig | None = None,
        topology: Topology | None = None,
        data: Path | None = None,
    ):

        value: Any = cfg
        if not isinstance(value, BatchJobConfig | None):
            remedy = "pass a nestrec.inference.batch_inference.BatchJobConfig, for example BatchJobConfig(k=20)"
            raise UserError("must be a BatchJobConfig", option="cfg", value=value, remedy=remedy)
        options = cfg or BatchJobConfig()
        context = {"context": plain_values(options.context, "context")}
        self.servable = servable
        self.cfg = from_plain(BatchJobConfig, to_plain(replace(options, context={})) | context)
        self._topology = topology or Topology.single(servable.device)
        self._data = data
        adapter = make_adapter(servable, self.cfg.history_stride)
        if not isinstance(adapter, RetrievalAdapter):
            remedy = "use a retrieval model"
            raise UserError(
                "a ranking model cannot search the catalog", option="model", value=servable.spec.name, remedy=remedy
            )
        self.num_unknown_users = 0
        """Number of users of the last job without a result, because the model knows none of their events; set on the
        first rank."""
        self._adapter = adapter
        self._item_keys = _strings(list(servable.item_keys))

    def recommend(self, users: Path | str, output: Path | str, *, data: Path | str | None = None) -> int:
        """Write the best items of each user to a Parquet file with the columns user, items and scores.

        Args:
            users: `all`, a text file with one user id per line, or a Parquet file with histories (see `open_users`).
            output: Parquet file to write. Items and scores are lists, best first.
            data: Folder of the dataset of the users; None uses that of the job.

        Returns:
            The number of users.
        """
        file = _check_output(output, _PARQUET)
        result = self._users(users, data, file)
        with raise_if_unwritable(file, "output"):
            return self._write(result, file, "recommend", self._recommend_batch)

    def embed_users(self, users: Path | str, output: Path | str, *, data: Path | str | None = None) -> int:
        """Write user embeddings, whose inner products with the item embeddings are the scores.

        Args:
            users: As in `recommend`.
            output: Parquet file with the columns user and vector, or NAME.npy, which also writes the ids to
                NAME.keys.json.
            data: As in `recommend`.

        Returns:
            The number of users.
        """
        file = _check_output(output, (*_PARQUET, ".npy"))
        result = self._users(users, data, file)
        with raise_if_unwritable(file, "output"):
            return self._write(result, file, "embed", self._embed_batch)

    def embed_items(self, output: Path | str) -> int:
        """Write the embeddings of all items in the formats of `embed_users`; return their number."""
        assert self.servable.index is not None
        file = _check_output(output, (*_PARQUET, ".npy"))
        if self._topology.is_first:
            vectors = np.concatenate([part.float().cpu().numpy() for _, part in self.servable.index.parts()])
            with raise_if_unwritable(file, "output"):
                _write_output(file, [_vector_table("item", self._item_keys, vectors)])
        return len(self._item_keys)

    def _users(self, users: Path | str, data: Path | str | None, output: Path) -> UserSource:
        result = open_users(users, self.servable, data or self._data, self.cfg.context)
        if output.exists() and Path(users).exists() and output.samefile(users):
            remedy = "use another file name"
            raise UserError("would overwrite the users file", option="output", value=str(output), remedy=remedy)
        return result

    def _write(
        self,
        users: UserSource,
        output: Path,
        what: Literal["recommend", "embed"],
        compute: Callable[[list[ResolvedUser]], pa.Table],
    ) -> int:
        parts = output.with_name(output.name + ".parts")
        model = self.servable.version or self._weights_digest()
        self._start_or_resume(parts, {"what": what, "model": model, "users": users.digest, **to_plain(self.cfg)})
        firsts = list(range(0, len(users), self.cfg.part_users))
        files = [parts / f"part-{number:06d}.parquet" for number in range(len(firsts))]
        for number in range(self._topology.rank, len(firsts), self._topology.world):
            if not files[number].exists():
                first = firsts[number]
                chosen = users.read(first, min(first + self.cfg.part_users, len(users)))
                tables = [compute(chosen.users(*span)) for span in self._batches(chosen)]
                _write_table(files[number], pa.concat_tables(tables))
                fail_point("batch.part_written")
        barrier(self._topology.control)
        if self._topology.is_first:
            tables = [_read(file, pq.read_table) for file in files] or [compute([])]
            self.num_unknown_users = sum(_num_without_result(table) for table in tables)
            _write_output(output, tables)
            shutil.rmtree(parts)
        barrier(self._topology.control)
        return len(users)

    def _start_or_resume(self, parts: Path, job: dict[str, Any]) -> None:
        """Create the folder of parts, or check that the existing one belongs to the same job."""
        text = json.dumps(job, sort_keys=True, indent=2)
        if self._topology.is_first:
            parts.mkdir(parents=True, exist_ok=True)
            if not (parts / JOB_FILE).exists():
                for stale in parts.glob("part-*.parquet"):  # left by a job that was killed while it removed its parts
                    stale.unlink()
                write_atomic(parts / JOB_FILE, text)
        barrier(self._topology.control)
        existing = _read(parts / JOB_FILE, _read_job)
        if others := sorted(name for name in existing.keys() | job.keys() if existing.get(name) != job.get(name)):
            shown = [f"{name} {existing.get(name)}" for name in others if name not in _DIGESTS]
            named = ", ".join([*(f"other {name}" for name in others if name in _DIGESTS), *shown])
            remedy = "remove the folder, or use the model, users and options with which that job was started"
            raise UserError(
                f"contains parts of another job ({named})", option="output", value=str(parts), remedy=remedy
            )

    def _weights_digest(self) -> str:
        """Return the digest of the weights of a run that was not exported and so has no version."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.servable.model.state_dict().items()):
            digest.update(name.encode() + tensor.cpu().contiguous().view(-1).view(dtype=_BYTES).numpy().tobytes())
        assert self.servable.index is not None
        tables = {id(table): table for table in (self.servable.index, *self.servable.tables.values())}
        for table in tables.values():  # columns may share one
            for _, part in table.parts():
                digest.update(part.cpu().contiguous().view(-1).view(dtype=_BYTES).numpy().data)
        return digest.hexdigest()

    def _batches(self, users: UserColumns) -> list[tuple[int, int]]:
        """Return the first and end user of each batch; batches are smaller if events have many fields to look up."""
        max_tokens = self.cfg.max_batch_tokens // max(1, self._adapter.num_fields // _USUAL_FIELDS)
        bounds = [0]
        tokens = 0
        for index, length in enumerate(np.minimum(users.lengths, self._adapter.max_events).tolist()):
            if index > bounds[-1] and tokens + length > max_tokens:
                bounds.append(index)
                tokens = 0
            tokens += length
        return [*itertools.pairwise([*bounds, len(users)])]

    def _recommend_batch(self, users: list[ResolvedUser]) -> pa.Table:
        queries = user_queries(self._adapter, [(user.history, user.now_ms) for user in users])
        candidates = [
            Candidates(
                items=_NO_ITEMS,
                now_ms=user.now_ms,
                num_best=self.cfg.k,
                excluded=sorted_unique(user.seen) if self.cfg.exclude_seen else _NO_ITEMS,
            )
            for user in users
        ]
        results = self._adapter.best_of_queries(queries, candidates)
        # A server rejects requests of users without any known event, so they get an empty result here.
        results = [one if len(user.history) else _NO_RESULT for one, user in zip(results, users, strict=True)]
        offsets = pa.array(np.concatenate([[0], np.cumsum([len(items) for items, _ in results])]).astype(np.int32))
        items = np.concatenate([_NO_ITEMS, *(items for items, _ in results)])
        scores = np.concatenate([np.zeros(0, np.float32), *(scores[:, 0] for _, scores in results)])
        columns = {
            "user": _strings([user.key for user in users]),
            "items": pa.ListArray.from_arrays(offsets, self._item_keys.take(pa.array(items - 1))),
            "scores": pa.ListArray.from_arrays(offsets, pa.array(scores, pa.float32())),
        }
        return pa.table(columns)

    def _embed_batch(self, users: list[ResolvedUser]) -> pa.Table:
        queries = user_queries(self._adapter, [(user.history, user.now_ms) for user in users])
        return _vector_table("user", _strings([user.key for user in users]), queries.float().cpu().numpy())


def _check_output(output: Path | str, suffixes: tuple[str, ...]) -> Path:
    """Return the output path after checking its suffix, which selects the file format."""
    if not isinstance(output, str | Path):
        raise UserError("must be a path", option="output", value=output, remedy="pass a file name such as recs.parquet")
    if Path(output).suffix not in suffixes:
        remedy = f"use a name that ends in {' or '.join(suffixes[1:])}"
        raise UserError("unsupported file type", option="output", value=str(output), remedy=remedy)
    check_file(Path(output))
    return Path(output)


def _read(file: Path, read: Callable[[Path], T]) -> T:
    """Read a file that an earlier start of the job has written."""
    try:
        return read(file)
    except (OSError, ValueError) as error:  # Arrow's read errors are ValueErrors
        remedy = "delete the file and start the job again, which recomputes it"
        if file.name == JOB_FILE:
            remedy = f"delete {file.parent} and start the job again; it starts from the beginning"
        raise CorruptFileError(f"cannot be read: {error}", option="part", value=str(file), remedy=remedy) from error


def _read_job(file: Path) -> dict[str, Any]:
    job = json.loads(file.read_bytes())
    if not isinstance(job, dict):
        raise ValueError("it is not a JSON object")
    return dict(with_present_names(BatchJobConfig, job))


def _num_without_result(table: pa.Table) -> int:
    if "items" in table.column_names:
        return int(pc.sum(pc.equal(pc.list_value_length(table["items"]), 0)).as_py() or 0)
    vectors = table["vector"].combine_chunks()
    numbers = vectors.flatten().to_numpy().reshape(len(table), vectors.type.list_size)
    return int((~numbers.any(axis=1)).sum())


def _strings(values: list[str]) -> pa.Array:
    return pa.array(values, pa.string())


def _vector_table(name: str, keys: pa.Array, vectors: np.ndarray[Any, np.dtype[np.float32]]) -> pa.Table:
    flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    return pa.table({name: keys, "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])})


def _write_output(output: Path, tables: list[pa.Table]) -> None:
    """Write a Parquet file with one row group per part, or vectors as NAME.npy and their ids as NAME.keys.json."""
    _remove_leftovers(output)
    if output.suffix != ".npy":
        _write_table(output, *tables)
        return
    table = pa.concat_tables(tables)
    vectors = table["vector"].combine_chunks()
    with replaced_file(output) as partial, partial.open("wb") as stream:
        np.save(stream, vectors.flatten().to_numpy().reshape(len(table), vectors.type.list_size))
        output.with_suffix(".keys.json").write_text(json.dumps(table.column(0).to_pylist()))


def _write_table(path: Path, *tables: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        replaced_file(path) as partial,
        pq.ParquetWriter(partial, tables[0].schema, compression="zstd") as writer,
    ):
        for table in tables:
            writer.write_table(table, row_group_size=max(1, len(table)))


def _remove_leftovers(output: Path) -> None:
    """Remove temporary files that killed jobs left next to this output; only one job per output may run at a time."""
    remove_partials(output.parent, output.name)
    for suffix in (".writing", ".writing.npy"):  # temporary names of earlier versions of nestrec
        output.with_name(f".{output.name}{suffix}").unlink(missing_ok=True)
