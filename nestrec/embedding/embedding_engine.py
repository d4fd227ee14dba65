"""The embedding engine: tables sharded over ranks, read and updated one training batch at a time.

    routed  = engine.route(keys)                          collective; or route(*micro_batches)
    working = engine.fetch(routed, step=t)                local: rows from the stores
    vectors = engine.exchange_vectors(routed, working)    collective; once for each micro-batch
    ...forward and backward; the vectors are the caller's leaves...
    engine.accumulate(routed, working, gradients)         collective; once for each micro-batch, in order
    engine.update(working, learning_rate=lr)              local: one optimiser step on the rows of the batch
    engine.write_back(working)                            local: rows to the stores

`route` is `deduplicate` (local), `exchange_keys` (collective) and `arrange` (local); `accumulate` is
`send_gradients` (`exchange_gradients`, collective, and `add_gradients`, local) and `sum_over_holders` (collective);
`update` is `update_rows` (local) and `average_over_holders` (collective). Pipelines call each on its own lane. What is
over holders does nothing unless there are replica groups.

One rank takes the same path as many: its exchanges are no-ops.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import to_plain
from nestrec.base.errors import UserError
from nestrec.distributed.collectives import agree, all_gather_equal, exchange
from nestrec.distributed.topology import Topology
from nestrec.distributed.transports import AllToAllPayload
from nestrec.embedding.hashing import hashed_rows
from nestrec.embedding.optimizer_checks import check_optimizers
from nestrec.embedding.routing.batch_overlap import Overlap, PrefetchedRows
from nestrec.embedding.routing.deduplicated_keys import DeduplicatedKeys, FeatureKeys, deduplicate
from nestrec.embedding.routing.hierarchical_exchange import HierarchicalExchange, check_rows_are_whole
from nestrec.embedding.routing.key_routing import (
    RequestedKeys,
    RoutedKeys,
    arrange,
    exchange_keys,
    join_holders,
    key_bytes_sent,
    route,
)
from nestrec.embedding.routing.replica_key_union import (
    Averaged,
    ReplicaKeyUnion,
    ReplicaSyncConfig,
    check_tables_can_differ,
    mean_bytes_sent,
    mean_over_holders,
)
from nestrec.embedding.routing.replica_reduction import GradientBroadcast, sum_over_holders
from nestrec.embedding.routing.replicated_routing import spread_sums
from nestrec.embedding.routing.row_exchange import (
    ConcatRows,
    RowExchange,
    arrived_vectors,
    joined_gradients,
    vectors_of,
)
from nestrec.embedding.routing.working_set import FiniteRowCheck, RowBuffers, RowSelection, WorkingSet, WorkingTable
from nestrec.embedding.row_optimizer import RowLayout
from nestrec.embedding.sharded_top_k import Candidates, RowTransform, TopKQuery, top_k
from nestrec.embedding.table_config import (
    WORD_BYTES,
    RowShapes,
    TableConfig,
    TableSpecs,
    check_placements,
    check_tables,
)
from nestrec.embedding.table_shard import Chunk, FetchedRows, TableShard, table_digest
from nestrec.embedding.table_snapshot import TableSnapshot
from nestrec.jagged import Jagged
from nestrec.ops.embedding.row_copy import Int64, gather_spans
from nestrec.ops.embedding.row_gather import gather_rows
from nestrec.ops.embedding.stochastic_rounding import whole
from nestrec.trace.tracer import EmbeddingStatistics


class EmbeddingEngine:
    """All tables of a model on one rank."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        topology: Topology,
        device: torch.device | str = "cpu",
        replica_sync: ReplicaSyncConfig | None = None,
    ) -> None:
        check_tables(tables)
        check_placements(tables, topology)
        check_optimizers(tables, torch.device(device))
        agree(topology.control, "tables", [_as_agreed(t) for t in tables])
        self.replica_sync = replica_sync or ReplicaSyncConfig()
        self._replicas: ReplicaKeyUnion | None = None
        if topology.num_replicas > 1:
            self._replicas = ReplicaKeyUnion(self.replica_sync, topology.replica_keys)
            if self.replica_sync.mode == "weights":
                check_tables_can_differ(tables)
        self.tables = {t.name: t for t in tables}
        self.topology = topology
        self.device = torch.device(device)
        self._shard = topology.shard
        self._num_shards = topology.num_shards
        hosts = topology.hosts
        self._vectors = topology.vectors if hosts is None else hosts.vectors_between
        self._place = self._vectors.rank
        if hosts is not None:
            check_rows_are_whole(tables)
        self.shards = {t.name: TableShard(t, self._shard, self._num_shards, self.device) for t in tables}
        self.shapes = RowShapes.of(tables)
        self._specs = TableSpecs.of(tables)
        self.statistics = EmbeddingStatistics()
        self.reads_ahead = PrefetchedRows()
        self.row_watch = FiniteRowCheck(len(self.tables), self.device)
        self._hashed_features = {f: t.num_rows or 1 for t in tables if t.is_hashed for f in t.feature_names}

    def grow(self, tables: Sequence[TableConfig]) -> None:
        """The same tables with more keys: rows keep their values, those of new keys begin as always. Between steps."""
        agree(self.topology.control, "tables", [_as_agreed(t) for t in tables])
        assert [t.name for t in tables] == list(self.tables)
        for table in tables:
            assert (table.num_rows or 0) >= (self.tables[table.name].num_rows or 0)
            self.shards[table.name].grow(table)
        self.tables = {t.name: t for t in tables}
        self._specs = TableSpecs.of(tables)

    def route(self, *micro_batches: FeatureKeys, step: int = 0, window_cache: bool = False) -> RoutedKeys:
        """Route a batch given as one or more micro-batches: feature name to keys of any shape, on the host.

        Collective; every rank gives the same number of micro-batches and all features in each, empty where it has no
        samples. window_cache: a key used by several micro-batches of a rank crosses once in each direction.
        step: of the batch, from 1; only needed where weights are averaged over replica groups.
        """
        source = self.deduplicate(*micro_batches, window_cache=window_cache)
        return self.arrange(source, self.exchange_keys(source, step=step))

    def deduplicate(self, *micro_batches: FeatureKeys, window_cache: bool = False) -> DeduplicatedKeys:
        """What this rank will ask for. Local."""
        self._check_features(micro_batches)
        hashed = tuple(map(self._hashed, micro_batches))
        return deduplicate(hashed, self._specs, self._num_shards, self.device, window_cache=window_cache)

    def exchange_keys(self, source: DeduplicatedKeys, *, step: int = 0) -> RequestedKeys:
        """Tell the owners. Collective; a mistake in any rank's keys raises the same BatchError on every rank."""
        holders = None if self._replicas is None else self.topology.replica_keys
        asked = exchange_keys(source, self._specs, self.topology, holders)
        return asked if self._replicas is None else join_holders(asked, self._replicas, source.num_micro_batches, step)

    def arrange(self, source: DeduplicatedKeys, asked: RequestedKeys) -> RoutedKeys:
        """What crosses with each micro-batch. Local."""
        holder = self.topology.replicas.rank
        routed = arrange(source, asked, self._specs, self.shapes, self.device, holder, self._place)
        self.statistics.keys.add(len(source.owners), key_bytes_sent(asked, self._place))
        return routed

    def fetch(self, routed: RoutedKeys, *, step: int, buffers: RowBuffers | None = None) -> WorkingSet:
        """Rows of the batch of `step` (from 1) that this shard owns. Batches are fetched in order of step.

        buffers: where the rows are put, by turns; none takes fresh memory.
        """
        working = self._working_set(routed, step, buffers)
        for number, (name, shard) in enumerate(self.shards.items()):
            keys = routed.owned[name]
            into = working.rows_of(number, len(keys))
            fetched = shard.fetch(keys, step, into, num_used=routed.num_touched[name])
            working.tables[name] = WorkingTable(
                shard.optimizer,
                shard.layout,
                fetched,
                num_touched=routed.num_touched[name],
                averaged=routed.averaged.get(name),
                gradient_scale=self.topology.num_replicas if self.replica_sync.mode == "weights" else 1,
            )
            self.statistics.rows_fetched += len(fetched.keys)
        return working

    def read_ahead(self, routed: RoutedKeys, *, step: int) -> WorkingSet:
        """Rows as the stores hold them now; creates, counts and evicts nothing. They may be old when they are used."""
        working = self._read(routed, step)
        self.reads_ahead.began(working)
        return working

    def _read(self, routed: RoutedKeys, step: int) -> WorkingSet:
        working = self._working_set(routed, step, None)
        for number, (name, shard) in enumerate(self.shards.items()):
            keys = routed.owned[name]
            nowhere = np.full(len(keys), -1, np.int64)
            rows = shard.read(keys, working.rows_of(number, len(keys)))
            read = FetchedRows(keys, nowhere, rows, np.zeros(len(keys), np.bool_))
            working.tables[name] = WorkingTable(shard.optimizer, shard.layout, read)
        return working

    def _working_set(self, routed: RoutedKeys, step: int, buffers: RowBuffers | None) -> WorkingSet:
        num_rows = np.array([len(routed.owned[name]) for name in self.shards], np.int64)
        return WorkingSet.of(step, num_rows, self.shapes, self.device, buffers)

    def exchange_vectors(
        self, routed: RoutedKeys, working: WorkingSet, micro_batch: int = 0, into: ConcatRows | None = None
    ) -> dict[str, torch.Tensor]:
        """Table to (U, dim) vectors of the distinct keys of a micro-batch, in the order of its index. Collective.

        into: where they are put; they are not returned then.
        """
        part = routed.micro_batches[micro_batch]
        run = self._receive(routed, micro_batch, working, into)
        leg = part.vectors
        served = part.vectors.asked_sizes * WORD_BYTES
        self.statistics.vectors.add(len(leg.asked_rows), int(served.sum() - served[self._place]))
        self.statistics.vector_bytes += int(served.sum())
        return vectors_of(run, self.shapes, list(self.tables)) if into is None else {}

    def _receive(self, routed: RoutedKeys, p: int, working: WorkingSet, into: ConcatRows | None = None) -> ConcatRows:
        part = routed.micro_batches[p]
        relay = routed.relay
        leg = part.vectors
        shipment = AllToAllPayload(leg.asked_sizes, leg.own_sizes, working.words, working.vector_writer(leg))
        pieces = exchange(self._vectors, shipment)
        if relay is None:
            return arrived_vectors(leg, pieces, part.num_rows, self.shapes, into)
        run = relay.vectors(p, self.shapes, self.device)
        arrived_vectors(leg, pieces, run.num_rows, self.shapes, run)
        return self._receive_within(relay.micro_batches[p].vectors, run, part.num_rows, into)

    def _receive_within(
        self, leg: RowExchange, run: ConcatRows, num_rows: Int64, into: ConcatRows | None
    ) -> ConcatRows:
        """Vectors that have come for the ranks of this host, handed to them. Collective over the host."""
        assert self.topology.hosts is not None
        write = partial(gather_spans, run.elements, run.spans, leg.asked_rows)
        shipment = AllToAllPayload(leg.asked_sizes, leg.own_sizes, run.elements, write)
        self.statistics.within_host.add(len(leg.asked_rows), int(leg.asked_sizes.sum()) * WORD_BYTES)
        pieces = exchange(self.topology.hosts.vectors_within, shipment)
        return arrived_vectors(leg, pieces, num_rows, self.shapes, into)

    def accumulate(
        self, routed: RoutedKeys, working: WorkingSet, gradients: Mapping[str, torch.Tensor], micro_batch: int = 0
    ) -> None:
        """Send (U, dim) gradients of a micro-batch to the owners, which add them up. Collective; micro-batches in order
        (order of sums).

        The gradients are given away: with one rank they become the sums themselves.
        """
        self.send_gradients(routed, working, gradients, micro_batch)
        self.sum_over_holders(routed, working, micro_batch)

    def send_gradients(
        self,
        routed: RoutedKeys,
        working: WorkingSet,
        gradients: Mapping[str, torch.Tensor] | Mapping[torch.dtype, ConcatRows],
        micro_batch: int,
    ) -> None:
        """`accumulate` as far as the owners among this rank's group: exchanged, and added by them. Collective."""
        self.add_gradients(routed, working, self.exchange_gradients(routed, gradients, micro_batch), micro_batch)

    def exchange_gradients(
        self,
        routed: RoutedKeys,
        gradients: Mapping[str, torch.Tensor] | Mapping[torch.dtype, ConcatRows],
        micro_batch: int,
    ) -> dict[torch.dtype, list[torch.Tensor]]:
        """For each type of gradients what the owner receives, in order of source. Collective.

        gradients: by table, in the order of the index; or runs that hold more than them, as the window cache does. They
        may come in memory that is used again: valid until the next exchange.
        """
        part = routed.micro_batches[micro_batch]
        is_in_order = all(leg.is_in_order for leg in part.gradients.values())  # then no kernel asks where rows lie
        where = torch.device("cpu") if is_in_order else self.device
        runs = joined_gradients(gradients, part.num_rows, self.shapes, where)
        received = {}
        for dtype, leg in part.gradients.items():
            run, ready = runs[dtype], runs[dtype].elements if leg.is_in_order else None
            if routed.relay is not None:
                run = self._sum_within(routed.relay, run, dtype, micro_batch)
            write = partial(gather_spans, run.elements, run.spans, leg.own_rows)
            shipment = AllToAllPayload(leg.own_sizes, leg.asked_sizes, run.elements, write, ready)
            received[dtype] = exchange(self._vectors, shipment)
            others = int(leg.own_sizes.sum() - leg.own_sizes[self._place])
            self.statistics.gradients.add(len(leg.own_rows), others * dtype.itemsize)
        return received

    def _sum_within(self, relay: HierarchicalExchange, run: ConcatRows, dtype: torch.dtype, p: int) -> ConcatRows:
        """Gradients of the ranks of this host, summed where they leave it. Collective over the host."""
        assert self.topology.hosts is not None
        leg = relay.micro_batches[p].gradients[dtype]
        write = partial(gather_spans, run.elements, run.spans, leg.own_rows)
        shipment = AllToAllPayload(leg.own_sizes, leg.asked_sizes, run.elements, write)
        self.statistics.within_host.add(len(leg.own_rows), int(leg.own_sizes.sum()) * dtype.itemsize)
        return relay.add(p, dtype, exchange(self.topology.hosts.vectors_within, shipment), self.shapes)

    def add_gradients(
        self, routed: RoutedKeys, working: WorkingSet, received: Mapping[torch.dtype, Sequence[torch.Tensor]], p: int
    ) -> None:
        """Add what `exchange_gradients` gave for micro-batch p to the sums of the working set. Local; micro-batches in
        order (order of sums)."""
        for dtype, leg in routed.micro_batches[p].gradients.items():
            is_all = routed.is_plain and leg.is_in_order
            working.add(leg, received[dtype], dtype, is_all=is_all)

    def sum_over_holders(self, routed: RoutedKeys, working: WorkingSet, micro_batch: int) -> None:
        """Gradients that are complete after a micro-batch, summed over the holders of their rows, or sent from the
        owners of rows that all ranks hold. Collective; after `add_gradients` of the micro-batch, micro-batches in
        order."""
        holders = self.topology.replicas
        for dtype, rows in routed.micro_batches[micro_batch].crossing.items():
            if isinstance(rows, GradientBroadcast):
                sent = spread_sums(self._vectors, rows, working.sums(dtype))
                self.statistics.replicas.add(rows.num_own(self._place), sent)
            else:
                sent = sum_over_holders(holders, rows, working.sums(dtype), working.totals(dtype))
                self.statistics.replicas.add(rows.num_own(holders.rank), sent)

    def update(self, working: WorkingSet, *, learning_rate: float) -> None:
        """One row optimiser step on every row of the batch, with the step of the batch.

        Collective where there are replica groups.
        """
        self.update_rows(working, learning_rate=learning_rate)
        self.average_over_holders(working)

    def update_rows(
        self, working: WorkingSet, *, learning_rate: float, places: Mapping[str, RowSelection] | None = None
    ) -> None:
        """The row optimiser step alone, on all rows or on the chosen ones of each table. Local."""
        for number, (name, table) in enumerate(working.tables.items()):
            if places is None:
                updated = table.update(working.step, learning_rate)
            else:
                updated = table.update_some(places[name], working.step, learning_rate)
            if updated is not None:
                self.row_watch.look(number, table.layout, updated)

    def average_over_holders(self, working: WorkingSet) -> None:
        """Copies of rows replaced by their mean, in the steps that replica_sync names. Collective."""
        what = self.replica_sync.averaged_at(working.step)
        if what is not None:
            copies = [(t.fetched.rows, t.averaged, t.layout) for t in working.tables.values() if t.averaged is not None]
            self._average(copies, what)

    def settle(self, step: int) -> None:
        """After a step, with no batch in flight: copies that may differ are averaged. Collective, or nothing to do."""
        if self._replicas is None or (unions := self._replicas.unsettled(step, len(self.tables))) is None:
            return
        shards = list(self.shards.values())
        fetched = [shard.fetch(keys, step, num_used=0) for shard, keys in zip(shards, unions, strict=True)]
        everything = [torch.arange(len(found.keys), device=self.device) for found in fetched]
        self._average([(f.rows, e, s.layout) for f, e, s in zip(fetched, everything, shards, strict=True)], "rows")
        for shard, found in zip(shards, fetched, strict=True):
            shard.write_back(found)

    def is_settled_after(self, step: int) -> bool:
        """Whether all copies of rows are alike after a step, with nothing left to `settle`."""
        return self._replicas is None or self._replicas.is_settled_after(step)

    def _average(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor, RowLayout]], what: Averaged) -> None:
        """For each table rows, places in the same order on every holder, and layout; one mean for each type."""
        taken = [rows.index_select(0, places) for rows, places, _ in copies]
        columns = [layout.columns if what == "rows" else layout.columns[:1] for _, _, layout in copies]
        views = [
            layout.view(rows, column.name)
            for rows, (_, _, layout), some in zip(taken, copies, columns, strict=True)
            for column in some
        ]
        holders = self.topology.replicas
        for dtype in dict.fromkeys(view.dtype for view in views):
            mine = [view for view in views if view.dtype == dtype]
            values = torch.cat([view.reshape(-1) for view in mine])[:, None]
            means = mean_over_holders(holders, values).view(-1).split([view.numel() for view in mine])
            for view, mean in zip(mine, means, strict=True):
                view.copy_(mean.view(view.shape))
            self.statistics.replicas.add(sum(len(view) for view in mine), mean_bytes_sent(holders, values))
        for (rows, places, _), averaged in zip(copies, taken, strict=True):
            rows.index_copy_(0, places.long(), averaged)

    def write_back(self, working: WorkingSet, shared: Overlap | None = None) -> None:
        """Rows and state of the batch to the stores.

        shared: rows that the next batch has taken over, which it will write in its turn (ordered write-back).
        """
        for name, table in working.tables.items():
            slots = None if shared is None else shared.tables[name].unshared_slots
            self.shards[name].write_back(table.fetched, slots)
            self.statistics.rows_written += len(table.fetched.keys) - (
                0 if shared is None else shared.num_rows_of(name)
            )

    def lookup_readonly(self, keys: FeatureKeys) -> dict[str, torch.Tensor]:
        """Feature to (*shape of its keys, dim) vectors, for evaluation: inserts, counts and evicts nothing.

        Collective. Keys without a row give their initial vector. Features that are not given count as empty. Rows of
        16 bits come as float32, which models compute in.
        """
        none = np.empty(0, np.int64)
        complete = {f: keys.get(f, none) for f in self._specs.features_F}
        routed = route([self._hashed(complete)], self._specs, self.shapes, self.topology, self.device)
        part = routed.micro_batches[0]
        working = self._read(routed, 0)
        found = vectors_of(self._receive(routed, 0, working), self.shapes, list(self.tables))
        return {
            f: gather_rows(whole(found[name]), part.index[f])
            for name, features in zip(self._specs.names_T, self._specs.features_T, strict=True)
            for f in features
        }

    def snapshot(self, table: str, *, since: int = -1) -> Iterator[Chunk]:
        """This rank's rows changed after `since`: chunks of host columns `keys`, `weight`, `state_*`, sorted by key.

        Dynamic tables add `uses` and `last_step`.
        """
        return self.shards[table].snapshot(since)

    def freeze(self, table: str, *, since: int = -1, max_bytes: int | None = None) -> TableSnapshot:
        """The same chunks in the order of their keys' hashes, as they are now: they are read while training goes on.

        max_bytes: see `TableShard.freeze`. The caller closes it.
        """
        return self.shards[table].freeze(since, max_bytes)

    def load(self, table: str, chunks: Iterable[Mapping[str, torch.Tensor]]) -> int:
        """Take the rows that this rank owns out of chunks saved by any number of ranks; how many it took."""
        return self.shards[table].load(chunks)

    def divide_room(self, table: str) -> None:
        """After a load of what another number of ranks saved: a bound on rows holds over all of them. Collective."""
        if self.shards[table].table.num_rows is not None:
            return  # a static table has room for all of its keys
        residency = self.shards[table].residency
        shards = self.topology.keys
        rows = all_gather_equal(shards, torch.tensor([residency.num_rows]))
        residency.divide_room([int(count) for count in rows], shards.rank)

    def clear(self, table: str) -> None:
        """Forget every row of a table."""
        self.shards[table].clear()
        self.row_watch.forget(list(self.tables).index(table))

    def unsettled(self, table: str) -> Chunk:
        """What a checkpoint of a dynamic table holds beside its rows: keys that wait for admission. Empty if static."""
        return self.shards[table].unsettled()

    def load_unsettled(self, table: str, saved: Mapping[str, torch.Tensor]) -> None:
        """Take what belongs to this rank out of the `unsettled` of any rank; call it for each saved rank."""
        self.shards[table].load_unsettled(saved)

    def evicted_since(self, table: str, step: int) -> torch.Tensor:
        """Sorted keys of this rank that lost their row after `step` and have none now, for incremental saves."""
        return torch.from_numpy(self.shards[table].residency.evicted_since(step))

    def gone_since(self, table: str, step: int) -> torch.Tensor:
        """Sorted keys of this rank that had a row after `step` and read their initial vector now, for those who keep no
        count of time: evicted, or past their time to live."""
        return torch.from_numpy(self.shards[table].residency.gone_since(step))

    def forget(self, table: str, keys: torch.Tensor) -> None:
        """Drop the rows of these keys where this rank has them (loading an incremental save)."""
        self.shards[table].residency.forget(keys.numpy())

    def drop_eviction_log(self, table: str, step: int) -> None:
        """No incremental save will ask for evictions up to `step` again."""
        self.shards[table].residency.drop_eviction_log(step)

    def digest(self, table: str) -> str:
        """The same text for the same rows, whatever the ranks, the store or the order of arrival. Collective."""
        return table_digest(self.shards[table], self.topology.keys)

    def top_k(
        self,
        table: str,
        queries_BD: torch.Tensor,
        k: int,
        *,
        exclude: Jagged | None = None,
        candidates: Candidates = None,
        row_transform: RowTransform | None = None,
        needs_rows: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, k) float32 scores, highest first, and (B, k) int64 keys of the rows with the largest dot products.

        Collective; each rank gives its own queries (B may be 0). exclude: keys that do not count, a row for each
        query; on every rank or on none. candidates: sorted keys that count, the same on every rank; none: every key
        of a static table, every row of a dynamic one. row_transform: (vectors, keys) to vectors, applied before
        scoring. needs_rows: candidates that a dynamic table has no row of do not count. Where fewer than k rows count,
        scores end in -inf and keys in -1. Equal scores are ordered by smaller key.
        """
        question = TopKQuery(
            k=k, exclude=exclude, candidates=candidates, row_transform=row_transform, needs_rows=needs_rows
        )
        return top_k(self.shards[table], self.topology, queries_BD, question)

    def store_statistics(self) -> dict[str, dict[str, int]]:
        """Table to what its shard on this rank holds and did: rows, bytes by kind of memory, evictions and more."""
        found = {}
        for name, shard in self.shards.items():
            residency = shard.residency
            counters = {f: getattr(residency.counters, f) for f in ("created", "evicted", "refused", "peak_rows")}
            found[name] = {"rows": residency.num_rows, **counters, **shard.store.statistics()}
        return found

    def close(self) -> None:
        """Give back the memory and files of the stores."""
        for shard in self.shards.values():
            shard.store.close()

    def _hashed(self, keys: FeatureKeys) -> FeatureKeys:
        """Rows in the place of the keys of hashed tables."""
        if not self._hashed_features:
            return keys
        rows = {f: hashed_rows(_on_host(keys[f]), num_rows) for f, num_rows in self._hashed_features.items()}
        return {**keys, **rows}

    def _check_features(self, micro_batches: Sequence[FeatureKeys]) -> None:
        known = set(self._specs.features_F)
        for micro_batch in micro_batches:
            if micro_batch.keys() == known:
                continue
            for name in sorted(known ^ set(micro_batch)):
                problem = (
                    "no table reads this feature"
                    if name in micro_batch
                    else "a batch must hold every feature, if empty"
                )
                raise UserError(problem, option="feature", value=name, remedy=f"the tables read {sorted(known)}")


def _as_agreed(table: TableConfig) -> Any:
    """What every rank must say of a table; where its disk is, is a rank's own business."""
    return to_plain(replace(table, store=replace(table.store, folder="")))


def _on_host(keys: NDArray[np.int64] | torch.Tensor) -> NDArray[np.int64]:
    return keys.cpu().numpy() if isinstance(keys, torch.Tensor) else keys
