"""Batch inference: the best items, or the vectors, of very many users, in parts that survive a kill.

A job is cut into parts of so many users. Each part is a file that appears whole; ranks take parts by turns, and a part
that is there is not computed again. When all are there the first rank joins them in order, so the output has the same
bytes on any number of ranks and however often the job was begun.

Users of a batch job: all of a dataset, those of a list, or those of a file with their histories.
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
from nestrec.base.files import check_file, remove_partials, replaced_file, told_if_unwritable, write_atomic
from nestrec.data.dataset import Dataset
from nestrec.distributed import Topology
from nestrec.distributed.collectives import barrier
from nestrec.exporters.dataset_users import NO_LIMITS, DatasetUsers, ResolvedUser, UserColumns
from nestrec.inference.request_parsing import plain_values
from nestrec.inference.users_file import FileUsers
from nestrec.serving.core.request_limits import BadRequestError, MissingInputError
from nestrec.serving.engine.reference_runner import user_queries
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver
from nestrec.serving.model.model_adapter import make_form
from nestrec.serving.model.request_inputs import Candidates, distinct
from nestrec.serving.model.retrieval_adapter import RetrievalAdapter
from nestrec.serving.model.servable import Servable

_MOST_NAMED = 1000
"""values of a category among which a similar one is looked for"""


class UserSource(Protocol):
    """Users in a fixed order."""

    @property
    def digest(self) -> str:
        """Of who they are and what they did."""
        ...

    def __len__(self) -> int: ...

    def read(self, first: int, end: int) -> UserColumns:
        """Those from `first` on, before `end`."""
        ...


def users_of(users: Path | str, servable: Servable, data: Path | str | None, context: Mapping[str, Any]) -> UserSource:
    """users: `all`, a text file with a key a line, or a Parquet file with the columns user, items and perhaps others of
    `nestrec.inference.users_file`. data: the dataset that keys are of. context: of the event that is asked for, by
    name of a feature, where a file does not tell it of each user."""
    given: Any = users
    if not isinstance(given, str | Path):
        remedy = 'give "all", or the path of a text file with a user a line or of a Parquet file with histories'
        raise UserError("is no path", option="users", value=given, remedy=remedy)
    users = str(users)
    if users != "all" and not Path(users).is_file():
        remedy = "write all, or a text file with a user a line, or a Parquet file with user, items and times_ms"
        raise UserError("is no file", option="users", value=users, remedy=remedy)
    _check_context(context, servable)
    if users.endswith(".parquet"):
        return FileUsers(Path(users), servable, context)
    if data is None:
        remedy = "name the dataset of the users (data), or a Parquet file of users with their histories"
        raise UserError("needs a dataset, which this model does not name", option="users", value=users, remedy=remedy)
    require(isinstance(data, str | Path), "is no path", option="data", value=data, remedy="give the folder of a dataset")
    return _UsersOfDataset(Dataset.open(data), servable, None if users == "all" else Path(users), context)


class _UsersOfDataset:
    def __init__(self, dataset: Dataset, servable: Servable, listed: Path | None, context: Mapping[str, Any]):
        self._dataset = dataset
        self._users = DatasetUsers(dataset, servable, context)
        self._places = np.arange(dataset.num_samples)
        if listed is not None:
            keys = [line for line in _text_of(listed).split("\n") if line]
            known = {key: place for place, key in enumerate(dataset.user_keys(self._places))}
            unknown = [key for key in keys if key not in known]
            if unknown:
                remedy = "list users of the dataset, one a line; histories stand in a file that ends with .parquet"
                raise UserError("are no users of the dataset", option="users", value=unknown[:10], remedy=remedy)
            self._places = np.array([known[key] for key in keys], np.int64)
        try:
            self.read(0, 0)
        except MissingInputError as error:  # of the context: a dataset does not say what will be
            name = error.field.partition(".")[2]
            remedy = f"set {error.field}, or export the model with defaults.features.{name}"
            raise UserError(error.message, option=error.field, value=None, remedy=remedy) from None

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._dataset.digest.encode() + self._places.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._places)

    def read(self, first: int, end: int) -> UserColumns:
        return self._users.read(self._places[first:end])


def _check_context(context: Mapping[str, Any], servable: Servable) -> None:
    """A mistake in it would be one in what everybody gets."""
    for name, value in context.items():
        field = f"context.{name}"
        known = servable.context_features
        if name not in known:
            remedy = did_you_mean(name, known) if known else "leave it out: the model reads none"
            raise UserError("is not read by the model", option=field, value=value, remedy=remedy)
        reader = RequestResolver(servable, NO_LIMITS, RequestNotes())
        column = servable.event_features[name]
        try:
            reader.values(value, 1, column, field, is_each=False)
        except BadRequestError as error:
            raise UserError(error.message, option=field, value=value, remedy="give it as requests do") from None
        for said in reader.notes.said()["unknown"]:
            is_short = column.keys is not None and len(column.keys) < _MOST_NAMED
            remedy = did_you_mean(str(said["ids"][0]), column.keys or ()) if is_short else "give one of the log"
            remedy += "; none stands for one that nobody knows"
            raise UserError("is no value that the model knows", option=field, value=value, remedy=remedy)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        remedy = "write a text file in UTF-8 with a user a line, or name a file that ends with .parquet"
        raise UserError("is no text in UTF-8", option="users", value=str(path), remedy=remedy) from None


T = TypeVar("T")
JOB_FILE = "job.json"
_DIGESTS = ("model", "users")
"""of a job: what nobody reads"""
_PARQUET = ("", ".parquet", ".pq")
_USUAL_FIELDS = 32
"""of an event: models that read more of each get fewer events at once"""
_NO_ITEMS = np.zeros(0, np.int64)
_BYTES = torch.uint8
_NOTHING = _NO_ITEMS, np.zeros((0, 1), np.float32)


@config
class BatchJobConfig:
    k: Count = 100
    """items of a user"""
    exclude_seen: bool = True
    """items of the history are not recommended"""
    part_size: Count = 4096
    """users of a part: what a killed job computes again at most, on each rank"""
    batch_tokens: Count = 65_536
    """events of users that are computed at once"""
    slide_events: Count | None = None
    """events by which a full history slides; none: as many as the model was measured with, as a server does"""
    context: Mapping[str, Any] = field(default_factory=dict)
    """of the event that is asked for, by name of a feature: its value for all users, where the model reads one"""


class BatchRecommender:
    """Recommends and embeds by a retrieval model, part by part."""

    def __init__(
        self,
        servable: Servable,
        cfg: BatchJobConfig | None = None,
        topology: Topology | None = None,
        data: Path | None = None,
    ):
        """topology: the ranks that share the work; none: this process alone. data: folder of the dataset of the users,
        if a job does not name another one."""
        given: Any = cfg
        if not isinstance(given, BatchJobConfig | None):
            remedy = "give a nestrec.inference.batch_inference.BatchJobConfig, such as BatchJobConfig(k=20)"
            raise UserError("are not the options of a batch job", option="cfg", value=given, remedy=remedy)
        own = cfg or BatchJobConfig()
        told = {"context": plain_values(own.context, "context")}
        self.servable = servable
        self.cfg = from_plain(BatchJobConfig, to_plain(replace(own, context={})) | told)
        self._topology = topology or Topology.single(servable.device)
        self._data = data
        form = make_form(servable, self.cfg.slide_events)
        if not isinstance(form, RetrievalAdapter):
            remedy = "name a retrieval model"
            raise UserError(
                "has no catalogue to recommend from", option="model", value=servable.spec.name, remedy=remedy
            )
        self.num_without = 0
        """users of the last job who got nothing, on the first rank: the model knows no event of theirs"""
        self._form = form
        self._item_keys = _strings(list(servable.item_keys))

    def recommend(self, users: Path | str, output: Path | str, *, data: Path | str | None = None) -> int:
        """Write user, items and scores, best first; the number of users. users, data: see `users_of`."""
        file = _named(output, _PARQUET)
        found = self._users(users, data, file)
        with told_if_unwritable(file, "output"):
            return self._write(found, file, "recommend", self._recommended)

    def embed_users(self, users: Path | str, output: Path | str, *, data: Path | str | None = None) -> int:
        """Write vectors whose products with those of items are the scores; the number of users."""
        file = _named(output, (*_PARQUET, ".npy"))
        found = self._users(users, data, file)
        with told_if_unwritable(file, "output"):
            return self._write(found, file, "embed", self._embedded)

    def embed_items(self, output: Path | str) -> int:
        """Write the vectors of all items; their number."""
        assert self.servable.index is not None
        file = _named(output, (*_PARQUET, ".npy"))
        if self._topology.is_first:
            vectors = np.concatenate([part.float().cpu().numpy() for _, part in self.servable.index.parts()])
            with told_if_unwritable(file, "output"):
                _write_output(file, [_vector_table("item", self._item_keys, vectors)])
        return len(self._item_keys)

    def _users(self, users: Path | str, data: Path | str | None, output: Path) -> UserSource:
        found = users_of(users, self.servable, data or self._data, self.cfg.context)
        if output.exists() and Path(users).exists() and output.samefile(users):
            remedy = "name another file: this one would be written over"
            raise UserError("is the file of users", option="output", value=str(output), remedy=remedy)
        return found

    def _write(
        self,
        users: UserSource,
        output: Path,
        what: Literal["recommend", "embed"],
        compute: Callable[[list[ResolvedUser]], pa.Table],
    ) -> int:
        parts = output.with_name(output.name + ".parts")
        model = self.servable.version or self._weights_digest()
        self._begin(parts, {"what": what, "model": model, "users": users.digest, **to_plain(self.cfg)})
        firsts = list(range(0, len(users), self.cfg.part_size))
        files = [parts / f"part-{number:06d}.parquet" for number in range(len(firsts))]
        for number in range(self._topology.rank, len(firsts), self._topology.world):
            if not files[number].exists():
                first = firsts[number]
                chosen = users.read(first, min(first + self.cfg.part_size, len(users)))
                tables = [compute(chosen.users(*span)) for span in self._batches(chosen)]
                _write_table(files[number], pa.concat_tables(tables))
                fail_point("batch.part_written")
        barrier(self._topology.control)
        if self._topology.is_first:
            tables = [_read(file, pq.read_table) for file in files] or [compute([])]
            self.num_without = sum(_num_without(table) for table in tables)
            _write_output(output, tables)
            shutil.rmtree(parts)
        barrier(self._topology.control)
        return len(users)

    def _begin(self, parts: Path, job: dict[str, Any]) -> None:
        """Parts of another job may not be mixed with this one's."""
        text = json.dumps(job, sort_keys=True, indent=2)
        if self._topology.is_first:
            parts.mkdir(parents=True, exist_ok=True)
            if not (parts / JOB_FILE).exists():
                for left in parts.glob("part-*.parquet"):  # of a job that was killed as it removed them
                    left.unlink()
                write_atomic(parts / JOB_FILE, text)
        barrier(self._topology.control)
        begun = _read(parts / JOB_FILE, _read_job)
        if others := sorted(name for name in begun.keys() | job.keys() if begun.get(name) != job.get(name)):
            shown = [f"{name} {begun.get(name)}" for name in others if name not in _DIGESTS]
            named = ", ".join([*(f"other {name}" for name in others if name in _DIGESTS), *shown])
            remedy = "remove the folder, or give the model, users and options that it was begun with"
            raise UserError(f"holds parts of another job ({named})", option="output", value=str(parts), remedy=remedy)

    def _weights_digest(self) -> str:
        """Of a run that was never exported."""
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
        """First user of each and the one behind its last. What is looked up of an event takes memory, too."""
        most = self.cfg.batch_tokens // max(1, self._form.num_fields // _USUAL_FIELDS)
        bounds = [0]
        tokens = 0
        for place, length in enumerate(np.minimum(users.lengths, self._form.max_events).tolist()):
            if place > bounds[-1] and tokens + length > most:
                bounds.append(place)
                tokens = 0
            tokens += length
        return [*itertools.pairwise([*bounds, len(users)])]

    def _recommended(self, users: list[ResolvedUser]) -> pa.Table:
        queries = user_queries(self._form, [(user.history, user.now_ms) for user in users])
        asked = [
            Candidates(
                items=_NO_ITEMS,
                now_ms=user.now_ms,
                num_best=self.cfg.k,
                excluded=distinct(user.seen) if self.cfg.exclude_seen else _NO_ITEMS,
            )
            for user in users
        ]
        found = self._form.best_of_queries(queries, asked)
        # A server refuses to recommend to whom nothing is known of.
        found = [one if len(user.history) else _NOTHING for one, user in zip(found, users, strict=True)]
        offsets = pa.array(np.concatenate([[0], np.cumsum([len(items) for items, _ in found])]).astype(np.int32))
        items = np.concatenate([_NO_ITEMS, *(items for items, _ in found)])
        scores = np.concatenate([np.zeros(0, np.float32), *(scores[:, 0] for _, scores in found)])
        columns = {
            "user": _strings([user.key for user in users]),
            "items": pa.ListArray.from_arrays(offsets, self._item_keys.take(pa.array(items - 1))),
            "scores": pa.ListArray.from_arrays(offsets, pa.array(scores, pa.float32())),
        }
        return pa.table(columns)

    def _embedded(self, users: list[ResolvedUser]) -> pa.Table:
        queries = user_queries(self._form, [(user.history, user.now_ms) for user in users])
        return _vector_table("user", _strings([user.key for user in users]), queries.float().cpu().numpy())


def _named(output: Path | str, suffixes: tuple[str, ...]) -> Path:
    """The file to be written: its name says what it is."""
    if not isinstance(output, str | Path):
        raise UserError("is no path", option="output", value=output, remedy="name a file, such as recs.parquet")
    if Path(output).suffix not in suffixes:
        remedy = f"name a file that ends with {' or '.join(suffixes[1:])}"
        raise UserError("has a name of another kind of file", option="output", value=str(output), remedy=remedy)
    check_file(Path(output))
    return Path(output)


def _read(file: Path, read: Callable[[Path], T]) -> T:
    """Returns what an earlier start of a job has written to a file."""
    try:
        return read(file)
    except (OSError, ValueError) as error:  # errors of Arrow are values that it cannot read
        remedy = "delete it and start the job again, which writes it again"
        if file.name == JOB_FILE:
            remedy = f"delete {file.parent} and start the job again, from its beginning"
        raise CorruptFileError(f"cannot be read: {error}", option="part", value=str(file), remedy=remedy) from error


def _read_job(file: Path) -> dict[str, Any]:
    job = json.loads(file.read_bytes())
    if not isinstance(job, dict):
        raise ValueError("it holds no named fields")
    return job


def _num_without(table: pa.Table) -> int:
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
    """Parquet with a row group a part, or vectors as NAME.npy with their keys beside them as NAME.keys.json."""
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
    """Remove what killed jobs with this output left next to it; a user runs one such job at a time."""
    remove_partials(output.parent, output.name)
    for suffix in (".writing", ".writing.npy"):  # the temporary names that earlier versions used
        output.with_name(f".{output.name}{suffix}").unlink(missing_ok=True)
