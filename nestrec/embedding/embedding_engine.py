"""The embedding engine: row-wise sharded embedding tables, read and updated one training batch at a time.

    routed  = engine.route(keys)                          collective; or route(*micro_batches)
    working = engine.fetch_rows(routed, step=t)           local: reads rows from the stores
    vectors = engine.exchange_vectors(routed, working)    collective; once per micro-batch
    ...forward and backward; the vectors are leaf tensors of the caller...
    engine.accumulate(routed, working, gradients)         collective; once per micro-batch, in order
    engine.update(working, learning_rate=lr)              local: one optimizer step on the rows of the batch
    engine.write_back(working)                            local: writes rows to the stores

In the terms of TorchRec, `route` is the input dist (keys to the owners of their rows), `exchange_vectors` is the output
dist (embedding vectors back), and `accumulate` is the backward pass of the output dist. All of them are all-to-all
exchanges between the shards.

`route` consists of `deduplicate` (local), `exchange_keys` (collective) and `build_exchange_plan` (local). `accumulate`
consists of `send_gradients` (`exchange_gradients`, collective, and `add_gradients`, local) and
`all_reduce_replica_gradients` (collective). `update` consists of `update_rows` (local) and `average_replicas`
(collective). Pipelines call each of them on a lane of its own. The replica methods do nothing without replica groups.

A single rank takes the same code path as many ranks; its exchanges are no-ops.
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
from nestrec.distributed.collectives import all_gather_equal, all_to_all_payload, assert_same_on_all_ranks
from nestrec.distributed.topology import Topology
from nestrec.distributed.transports import AllToAllPayload
from nestrec.embedding.hashing import hashed_rows
from nestrec.embedding.optimizer_checks import check_optimizers
from nestrec.embedding.routing.batch_overlap import Overlap, PrefetchedRows
from nestrec.embedding.routing.deduplicated_keys import DeduplicatedKeys, FeatureKeys, deduplicate
from nestrec.embedding.routing.hierarchical_exchange import HierarchicalExchange, check_full_precision
from nestrec.embedding.routing.key_routing import (
    RequestedKeys,
    RoutedKeys,
    build_exchange_plan,
    exchange_keys,
    join_replicas,
    key_bytes_sent,
    route,
)
from nestrec.embedding.routing.replica_key_union import (
    Averaged,
    ReplicaKeyUnion,
    ReplicaSyncConfig,
    check_weight_averaging,
    mean_bytes_sent,
    mean_over_replicas,
)
from nestrec.embedding.routing.replica_reduction import GradientBroadcast, reduce_replica_gradients
from nestrec.embedding.routing.replicated_routing import broadcast_gradient_sums
from nestrec.embedding.routing.row_exchange import (
    ConcatRows,
    RowExchange,
    concat_gradients,
    scatter_received_vectors,
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
from nestrec.ops.embedding.stochastic_rounding import to_float32
from nestrec.trace.tracer import EmbeddingStatistics


class EmbeddingEngine:
    """All embedding tables of a model on one rank.

    Collective: every rank creates the engine with the same tables and makes the same collective calls in the same
    order.

    Args:
        tables: Configs of the tables.
        topology: Process groups: shards, replica groups and hosts.
        device: Device on which the rows of a batch are computed.
        replica_sync: Synchronization of replicas; used only with several replica groups.

    Raises:
        UserError: If a config is invalid, differs between ranks, or does not fit the topology.
    """

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
        assert_same_on_all_ranks(topology.control, "tables", [_as_agreed(t) for t in tables])
        self.replica_sync = replica_sync or ReplicaSyncConfig()
        self._replicas: ReplicaKeyUnion | None = None
        if topology.num_replicas > 1:
            self._replicas = ReplicaKeyUnion(self.replica_sync, topology.replica_keys)
            if self.replica_sync.mode == "weights":
                check_weight_averaging(tables)
        self.tables = {t.name: t for t in tables}
        self.topology = topology
        self.device = torch.device(device)
        self._shard = topology.shard
        self._num_shards = topology.num_shards
        hosts = topology.hosts
        self._vectors = topology.vectors if hosts is None else hosts.vectors_between
        self._rank = self._vectors.rank
        if hosts is not None:
            check_full_precision(tables)
        self.shards = {t.name: TableShard(t, self._shard, self._num_shards, self.device) for t in tables}
        self.shapes = RowShapes.of(tables)
        self._specs = TableSpecs.of(tables)
        self.statistics = EmbeddingStatistics()
        self.prefetched_rows = PrefetchedRows()
        self.finite_row_check = FiniteRowCheck(len(self.tables), self.device)
        self._hashed_features = {f: t.num_rows or 1 for t in tables if t.is_hashed for f in t.feature_names}

    def grow(self, tables: Sequence[TableConfig]) -> None:
        """Enlarge the tables; existing rows keep their values and new keys get their usual initial vectors.

        Collective. Call it between steps.

        Args:
            tables: Configs of the same tables with `num_rows` equal or larger.
        """
        assert_same_on_all_ranks(self.topology.control, "tables", [_as_agreed(t) for t in tables])
        assert [t.name for t in tables] == list(self.tables)
        for table in tables:
            assert (table.num_rows or 0) >= (self.tables[table.name].num_rows or 0)
            self.shards[table.name].grow(table)
        self.tables = {t.name: t for t in tables}
        self._specs = TableSpecs.of(tables)

    def route(self, *micro_batches: FeatureKeys, step: int = 0, window_cache: bool = False) -> RoutedKeys:
        """Route the keys of a batch to the owners of their rows.

        Collective. Every rank passes the same number of micro-batches and all features in each, empty if it has no
        samples.

        Args:
            *micro_batches: Per micro-batch, feature name to keys of any shape, on the host.
            step: Step of the batch, from 1; needed only if weights are averaged over replica groups.
            window_cache: Whether the vector and the gradient of a key that several micro-batches of a rank use are
                transferred only once.

        Returns:
            The exchange plan of the batch.
        """
        source = self.deduplicate(*micro_batches, window_cache=window_cache)
        return self.build_exchange_plan(source, self.exchange_keys(source, step=step))

    def deduplicate(self, *micro_batches: FeatureKeys, window_cache: bool = False) -> DeduplicatedKeys:
        """Deduplicate the keys of this rank's batch. Local."""
        self._check_features(micro_batches)
        hashed = tuple(map(self._hash_keys, micro_batches))
        return deduplicate(hashed, self._specs, self._num_shards, self.device, window_cache=window_cache)

    def exchange_keys(self, source: DeduplicatedKeys, *, step: int = 0) -> RequestedKeys:
        """Send the unique keys to the owners of their rows (all-to-all). Collective.

        Raises:
            BatchError: If any rank has an invalid key; the error is the same on every rank.
        """
        replicas = None if self._replicas is None else self.topology.replica_keys
        requested = exchange_keys(source, self._specs, self.topology, replicas)
        return (
            requested
            if self._replicas is None
            else join_replicas(requested, self._replicas, source.num_micro_batches, step)
        )

    def build_exchange_plan(self, source: DeduplicatedKeys, requested: RequestedKeys) -> RoutedKeys:
        """Build the exchange plan: which rows are sent and received in each micro-batch. Local."""
        replica = self.topology.replicas.rank
        routed = build_exchange_plan(source, requested, self._specs, self.shapes, self.device, replica, self._rank)
        self.statistics.keys.add(len(source.owners), key_bytes_sent(requested, self._rank))
        return routed

    def fetch_rows(self, routed: RoutedKeys, *, step: int, buffers: RowBuffers | None = None) -> WorkingSet:
        """Read the rows of a batch that this shard owns. Local; batches must be fetched in order of step.

        Args:
            routed: Exchange plan of the batch.
            step: Step of the batch, from 1.
            buffers: Reusable buffers for the rows; None allocates new memory.

        Returns:
            The working set: weight and optimizer state of the rows.
        """
        working = self._working_set(routed, step, buffers)
        for number, (name, shard) in enumerate(self.shards.items()):
            keys = routed.owned[name]
            into = working.rows_of(number, len(keys))
            fetched = shard.fetch_rows(keys, step, into, num_used=routed.num_updated[name])
            working.tables[name] = WorkingTable(
                shard.optimizer,
                shard.layout,
                fetched,
                num_updated=routed.num_updated[name],
                averaged=routed.averaged.get(name),
                gradient_scale=self.topology.num_replicas if self.replica_sync.mode == "weights" else 1,
            )
            self.statistics.rows_fetched += len(fetched.keys)
        return working

    def prefetch_rows(self, routed: RoutedKeys, *, step: int) -> WorkingSet:
        """Read the current rows from the stores ahead of their step.

        The rows may be stale when they are used. Creates no rows, counts no uses and evicts nothing.
        """
        working = self._read(routed, step)
        self.prefetched_rows.record_read(working)
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
        """Exchange embedding vectors: owners send the vectors of a micro-batch to the requesting ranks. Collective.

        Args:
            routed: Exchange plan of the batch.
            working: Rows of the batch on this shard.
            micro_batch: Index of the micro-batch.
            into: Memory that receives the vectors; the returned dict is then empty.

        Returns:
            Table name to (U, dim) vectors of the unique keys, in the order that `RoutedMicroBatch.index` refers to.
        """
        routed_batch = routed.micro_batches[micro_batch]
        rows_received = self._receive(routed, micro_batch, working, into)
        row_exchange = routed_batch.vectors
        bytes_served = routed_batch.vectors.requested_sizes * WORD_BYTES
        self.statistics.vectors.add(
            len(row_exchange.requested_rows), int(bytes_served.sum() - bytes_served[self._rank])
        )
        self.statistics.vector_bytes += int(bytes_served.sum())
        return vectors_of(rows_received, self.shapes, list(self.tables)) if into is None else {}

    def _receive(self, routed: RoutedKeys, p: int, working: WorkingSet, into: ConcatRows | None = None) -> ConcatRows:
        routed_batch = routed.micro_batches[p]
        hierarchical = routed.hierarchical
        row_exchange = routed_batch.vectors
        payload = AllToAllPayload(
            row_exchange.requested_sizes, row_exchange.own_sizes, working.words, working.vector_writer(row_exchange)
        )
        pieces = all_to_all_payload(self._vectors, payload)
        if hierarchical is None:
            return scatter_received_vectors(row_exchange, pieces, routed_batch.num_rows, self.shapes, into)
        rows_received = hierarchical.vectors(p, self.shapes, self.device)
        scatter_received_vectors(row_exchange, pieces, rows_received.num_rows, self.shapes, rows_received)
        return self._receive_within(hierarchical.micro_batches[p].vectors, rows_received, routed_batch.num_rows, into)

    def _receive_within(
        self, row_exchange: RowExchange, rows_received: ConcatRows, num_rows: Int64, into: ConcatRows | None
    ) -> ConcatRows:
        """Distribute the vectors received from other hosts to the ranks of this host. Collective over the host."""
        assert self.topology.hosts is not None
        write = partial(gather_spans, rows_received.elements, rows_received.spans, row_exchange.requested_rows)
        payload = AllToAllPayload(row_exchange.requested_sizes, row_exchange.own_sizes, rows_received.elements, write)
        self.statistics.within_host.add(
            len(row_exchange.requested_rows), int(row_exchange.requested_sizes.sum()) * WORD_BYTES
        )
        pieces = all_to_all_payload(self.topology.hosts.vectors_within, payload)
        return scatter_received_vectors(row_exchange, pieces, num_rows, self.shapes, into)

    def accumulate(
        self, routed: RoutedKeys, working: WorkingSet, gradients: Mapping[str, torch.Tensor], micro_batch: int = 0
    ) -> None:
        """Send (U, dim) gradients of a micro-batch to the owners of the rows, which sum them. Collective.

        Call it for the micro-batches in order: the order of the summands is fixed, so that results are reproducible.
        The caller must not use the gradients afterwards: with one rank their memory becomes the sums.
        """
        self.send_gradients(routed, working, gradients, micro_batch)
        self.all_reduce_replica_gradients(routed, working, micro_batch)

    def send_gradients(
        self,
        routed: RoutedKeys,
        working: WorkingSet,
        gradients: Mapping[str, torch.Tensor] | Mapping[torch.dtype, ConcatRows],
        micro_batch: int,
    ) -> None:
        """Exchange gradients and sum them within the replica group; `accumulate` without the replicas. Collective."""
        self.add_gradients(routed, working, self.exchange_gradients(routed, gradients, micro_batch), micro_batch)

    def exchange_gradients(
        self,
        routed: RoutedKeys,
        gradients: Mapping[str, torch.Tensor] | Mapping[torch.dtype, ConcatRows],
        micro_batch: int,
    ) -> dict[torch.dtype, list[torch.Tensor]]:
        """Send gradients to the owners of their rows (all-to-all). Collective.

        Args:
            routed: Exchange plan of the batch.
            gradients: Table name to (U, dim) gradients in the order of the index, or dtype to concatenated rows that
                contain more than those, as with the window cache.
            micro_batch: Index of the micro-batch.

        Returns:
            Per gradient dtype the received gradients, in order of source rank. They may share a reused buffer and are
            valid until the next exchange.
        """
        routed_batch = routed.micro_batches[micro_batch]
        # Without a kernel that reads them, the row offsets can stay on the host.
        is_in_order = all(row_exchange.is_in_order for row_exchange in routed_batch.gradients.values())
        where = torch.device("cpu") if is_in_order else self.device
        concatenated = concat_gradients(gradients, routed_batch.num_rows, self.shapes, where)
        received = {}
        for dtype, row_exchange in routed_batch.gradients.items():
            rows_to_send, ready = (
                concatenated[dtype],
                concatenated[dtype].elements if row_exchange.is_in_order else None,
            )
            if routed.hierarchical is not None:
                rows_to_send = self._sum_within(routed.hierarchical, rows_to_send, dtype, micro_batch)
            write = partial(gather_spans, rows_to_send.elements, rows_to_send.spans, row_exchange.own_rows)
            payload = AllToAllPayload(
                row_exchange.own_sizes, row_exchange.requested_sizes, rows_to_send.elements, write, ready
            )
            received[dtype] = all_to_all_payload(self._vectors, payload)
            others = int(row_exchange.own_sizes.sum() - row_exchange.own_sizes[self._rank])
            self.statistics.gradients.add(len(row_exchange.own_rows), others * dtype.itemsize)
        return received

    def _sum_within(
        self, hierarchical: HierarchicalExchange, rows_to_send: ConcatRows, dtype: torch.dtype, p: int
    ) -> ConcatRows:
        """Sum the gradients of the ranks of this host on the relaying rank. Collective over the host."""
        assert self.topology.hosts is not None
        row_exchange = hierarchical.micro_batches[p].gradients[dtype]
        write = partial(gather_spans, rows_to_send.elements, rows_to_send.spans, row_exchange.own_rows)
        payload = AllToAllPayload(row_exchange.own_sizes, row_exchange.requested_sizes, rows_to_send.elements, write)
        self.statistics.within_host.add(len(row_exchange.own_rows), int(row_exchange.own_sizes.sum()) * dtype.itemsize)
        return hierarchical.add(p, dtype, all_to_all_payload(self.topology.hosts.vectors_within, payload), self.shapes)

    def add_gradients(
        self, routed: RoutedKeys, working: WorkingSet, received: Mapping[torch.dtype, Sequence[torch.Tensor]], p: int
    ) -> None:
        """Add the result of `exchange_gradients` for micro-batch `p` to the gradient sums of the working set.

        Local. Call it for the micro-batches in order, because the order of the summands is fixed.
        """
        for dtype, row_exchange in routed.micro_batches[p].gradients.items():
            is_all = routed.is_identity and row_exchange.is_in_order
            working.add(row_exchange, received[dtype], dtype, is_all=is_all)

    def all_reduce_replica_gradients(self, routed: RoutedKeys, working: WorkingSet, micro_batch: int) -> None:
        """Reduce the gradients that are complete after a micro-batch over all replicas (all-reduce). Collective.

        Gradient sums of replicated tables are broadcast from the owners of the rows instead. Call it after
        `add_gradients` of the micro-batch, for the micro-batches in order.
        """
        replicas = self.topology.replicas
        for dtype, rows in routed.micro_batches[micro_batch].replica_rows.items():
            if isinstance(rows, GradientBroadcast):
                sent = broadcast_gradient_sums(self._vectors, rows, working.sums(dtype))
                self.statistics.replicas.add(rows.num_own(self._rank), sent)
            else:
                sent = reduce_replica_gradients(replicas, rows, working.sums(dtype), working.totals(dtype))
                self.statistics.replicas.add(rows.num_own(replicas.rank), sent)

    def update(self, working: WorkingSet, *, learning_rate: float) -> None:
        """Apply one row optimizer step to every row of the batch, with the step number of the batch.

        Collective if there are several replica groups.
        """
        self.update_rows(working, learning_rate=learning_rate)
        self.average_replicas(working)

    def update_rows(
        self, working: WorkingSet, *, learning_rate: float, selections: Mapping[str, RowSelection] | None = None
    ) -> None:
        """Apply the row optimizer step to all rows, or to the selected rows of each table. Local."""
        for number, (name, table) in enumerate(working.tables.items()):
            if selections is None:
                updated = table.update(working.step, learning_rate)
            else:
                updated = table.update_selected(selections[name], working.step, learning_rate)
            if updated is not None:
                self.finite_row_check.check_rows(number, table.layout, updated)

    def average_replicas(self, working: WorkingSet) -> None:
        """Replace replicas of rows by their mean in the steps selected by `replica_sync`. Collective."""
        averaged_part = self.replica_sync.averaged_at(working.step)
        if averaged_part is not None:
            copies = [(t.fetched.rows, t.averaged, t.layout) for t in working.tables.values() if t.averaged is not None]
            self._average(copies, averaged_part)

    def synchronize_replicas(self, step: int) -> None:
        """Average the replicas that may differ after a step; no batch may be in flight.

        Collective, unless replicas are already synchronized.
        """
        if self._replicas is None or (unions := self._replicas.unsynchronized_keys(step, len(self.tables))) is None:
            return
        shards = list(self.shards.values())
        fetched = [shard.fetch_rows(keys, step, num_used=0) for shard, keys in zip(shards, unions, strict=True)]
        all_rows = [torch.arange(len(fetched_rows.keys), device=self.device) for fetched_rows in fetched]
        self._average([(f.rows, e, s.layout) for f, e, s in zip(fetched, all_rows, shards, strict=True)], "rows")
        for shard, fetched_rows in zip(shards, fetched, strict=True):
            shard.write_back(fetched_rows)

    def replicas_synchronized_after(self, step: int) -> bool:
        """Return whether all replicas are equal after a step, so that `synchronize_replicas` has nothing to do."""
        return self._replicas is None or self._replicas.replicas_synchronized_after(step)

    def _average(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor, RowLayout]], averaged_part: Averaged) -> None:
        """Average rows over the replicas, with one exchange per dtype.

        Args:
            copies: Per table the rows, the indices to average (in the same order on every replica) and the layout.
            averaged_part: Whether to average only the weights or complete rows.
        """
        taken = [rows.index_select(0, indices) for rows, indices, _ in copies]
        columns = [layout.columns if averaged_part == "rows" else layout.columns[:1] for _, _, layout in copies]
        views = [
            layout.view(rows, column.name)
            for rows, (_, _, layout), some in zip(taken, copies, columns, strict=True)
            for column in some
        ]
        replicas = self.topology.replicas
        for dtype in dict.fromkeys(view.dtype for view in views):
            same_dtype = [view for view in views if view.dtype == dtype]
            values = torch.cat([view.reshape(-1) for view in same_dtype])[:, None]
            means = mean_over_replicas(replicas, values).view(-1).split([view.numel() for view in same_dtype])
            for view, mean in zip(same_dtype, means, strict=True):
                view.copy_(mean.view(view.shape))
            self.statistics.replicas.add(sum(len(view) for view in same_dtype), mean_bytes_sent(replicas, values))
        for (rows, indices, _), averaged in zip(copies, taken, strict=True):
            rows.index_copy_(0, indices.long(), averaged)

    def write_back(self, working: WorkingSet, shared: Overlap | None = None) -> None:
        """Write the rows of the batch, weight and optimizer state, to the stores.

        Args:
            working: Rows of the batch.
            shared: Rows that were copied to the next batch, which writes them later (ordered write-back).
        """
        for name, table in working.tables.items():
            slots = None if shared is None else shared.tables[name].unshared_slots
            self.shards[name].write_back(table.fetched, slots)
            self.statistics.rows_written += len(table.fetched.keys) - (
                0 if shared is None else shared.num_rows_of(name)
            )

    def lookup_readonly(self, keys: FeatureKeys) -> dict[str, torch.Tensor]:
        """Look up embedding vectors for evaluation; creates no rows, counts no uses and evicts nothing. Collective.

        Keys without a row return their initial vector. Weights of 16 bits are returned as float32, the dtype that
        models compute in.

        Args:
            keys: Feature name to keys of any shape; missing features are empty.

        Returns:
            Feature name to vectors of shape (*shape of the keys, dim).
        """
        none = np.empty(0, np.int64)
        complete = {f: keys.get(f, none) for f in self._specs.features_F}
        routed = route([self._hash_keys(complete)], self._specs, self.shapes, self.topology, self.device)
        routed_batch = routed.micro_batches[0]
        working = self._read(routed, 0)
        fetched_rows = vectors_of(self._receive(routed, 0, working), self.shapes, list(self.tables))
        return {
            f: gather_rows(to_float32(fetched_rows[name]), routed_batch.index[f])
            for name, features in zip(self._specs.names_T, self._specs.features_T, strict=True)
            for f in features
        }

    def snapshot(self, table: str, *, since: int = -1) -> Iterator[Chunk]:
        """Iterate over this rank's rows changed after step `since`, sorted by key.

        Yields:
            Chunks of host columns `keys`, `weight` and `state_*`; dynamic tables add `uses` and `last_step`.
        """
        return self.shards[table].snapshot(since)

    def snapshot_async(self, table: str, *, since: int = -1, max_bytes: int | None = None) -> TableSnapshot:
        """Take a copy-on-write snapshot of this rank's rows, which is read while training continues.

        The chunks have the columns of `snapshot`, in the order of the hashes of their keys.

        Args:
            table: Name of the table.
            since: Include only rows changed after this step; -1 includes all rows.
            max_bytes: See `TableShard.snapshot_async`.

        Returns:
            The snapshot; the caller closes it.
        """
        return self.shards[table].snapshot_async(since, max_bytes)

    def load(self, table: str, chunks: Iterable[Mapping[str, torch.Tensor]]) -> int:
        """Load the rows that this rank owns from chunks saved by any number of ranks; return their number."""
        return self.shards[table].load(chunks)

    def rebalance_capacity(self, table: str) -> None:
        """Redistribute the `max_rows` of a table over the shards. Collective.

        Call it after loading rows that a different number of ranks saved.
        """
        if self.shards[table].table.num_rows is not None:
            return  # a static table has capacity for all of its keys
        key_index = self.shards[table].key_index
        shards = self.topology.keys
        rows = all_gather_equal(shards, torch.tensor([key_index.num_rows]))
        key_index.rebalance_capacity([int(count) for count in rows], shards.rank)

    def clear(self, table: str) -> None:
        """Delete every row of a table."""
        self.shards[table].clear()
        self.finite_row_check.clear(list(self.tables).index(table))

    def pending_key_state(self, table: str) -> Chunk:
        """Return the state of keys that wait for admission, saved with a dynamic table; empty if it is static."""
        return self.shards[table].pending_key_state()

    def load_pending_key_state(self, table: str, saved: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's keys from the `pending_key_state` of any rank; call it once per saved rank."""
        self.shards[table].load_pending_key_state(saved)

    def evicted_since(self, table: str, step: int) -> torch.Tensor:
        """Return the sorted keys of this rank evicted after `step` and without a row now, for incremental saves."""
        return torch.from_numpy(self.shards[table].key_index.evicted_since(step))

    def deleted_since(self, table: str, step: int) -> torch.Tensor:
        """Return the sorted keys of this rank that had a row after `step` and now read their initial vector.

        These are evicted keys and keys past their time to live; for readers that do not track step numbers themselves.
        """
        return torch.from_numpy(self.shards[table].key_index.deleted_since(step))

    def delete_rows(self, table: str, keys: torch.Tensor) -> None:
        """Delete the rows of those of these keys that this rank has (loading an incremental save)."""
        self.shards[table].key_index.delete_rows(keys.numpy())

    def drop_eviction_log(self, table: str, step: int) -> None:
        """Discard the log of evictions up to `step`, which no later incremental save needs."""
        self.shards[table].key_index.drop_eviction_log(step)

    def digest(self, table: str) -> str:
        """Return a digest of the rows; independent of ranks, store and order of insertion. Collective."""
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
        """Return the k rows with the largest dot products for each query (exact search). Collective.

        Equal scores are ordered by key, smallest first. If there are fewer than k candidates, scores are padded with
        -inf and keys with -1.

        Args:
            table: Name of the table.
            queries_BD: Queries of this rank; B may be 0 and may differ between ranks.
            k: Number of results per query.
            exclude: Keys to exclude, one row per query; passed on every rank or on none.
            candidates: Sorted keys to search, the same on every rank; None searches every key of a static table and
                every row of a dynamic table.
            row_transform: Function from (vectors, keys) to vectors, applied before scoring.
            needs_rows: Whether candidates without a row in a dynamic table are skipped.

        Returns:
            (B, k) float32 scores, highest first, and (B, k) int64 keys.
        """
        query = TopKQuery(
            k=k, exclude=exclude, candidates=candidates, row_transform=row_transform, needs_rows=needs_rows
        )
        return top_k(self.shards[table], self.topology, queries_BD, query)

    def store_statistics(self) -> dict[str, dict[str, int]]:
        """Return per table the statistics of its shard: rows, bytes per kind of memory, evictions and more."""
        fetched_rows = {}
        for name, shard in self.shards.items():
            key_index = shard.key_index
            counters = {f: getattr(key_index.counters, f) for f in ("created", "evicted", "not_admitted", "peak_rows")}
            fetched_rows[name] = {"rows": key_index.num_rows, **counters, **shard.store.statistics()}
        return fetched_rows

    def close(self) -> None:
        """Release the memory and files of the stores."""
        for shard in self.shards.values():
            shard.store.close()

    def _hash_keys(self, keys: FeatureKeys) -> FeatureKeys:
        """Replace the keys of hashed tables by row numbers."""
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
                    "no table has this feature"
                    if name in micro_batch
                    else "missing in the batch: every feature must be present, even if empty"
                )
                raise UserError(
                    problem,
                    option="feature",
                    value=name,
                    remedy=f"pass exactly the features of the tables: {sorted(known)}",
                )


def _as_agreed(table: TableConfig) -> Any:
    """Return the part of a config that must be equal on all ranks; the folder of a disk store may differ."""
    return to_plain(replace(table, store=replace(table.store, folder="")))


def _on_host(keys: NDArray[np.int64] | torch.Tensor) -> NDArray[np.int64]:
    return keys.cpu().numpy() if isinstance(keys, torch.Tensor) else keys
