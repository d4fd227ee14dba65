"""The item tower of the two-tower retrieval model: item vectors from ids and features.

`FeatureLookup` returns the embedding of a feature at each position of a micro-batch, pooled (embedding bag) if a
position has several ids. `ItemTower` builds item vectors and history tokens from them; training, evaluation and export
share this code.

Legend: U unique items, T tokens, D channels.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.data.batch_loader import OFFSETS, MicroBatch
from nestrec.data.samples.retrieval_inputs import AT, RetrievalInputs
from nestrec.embedding import EmbeddingEngine
from nestrec.embedding.sharded_top_k import RowTransform, owned_keys
from nestrec.models.encoder_parts import FeatureProjections, sum_features
from nestrec.models.heads import RetrievalModel
from nestrec.ops.embedding.row_gather import TableRows, gather_rows, pool_bags
from nestrec.pipeline.exchange_window import on_device
from nestrec.tasks.table_overrides import ResolvedTables
from nestrec.tasks.task import sequence_info


class FeatureLookup:
    """Returns the embeddings of a task's features in model width: looked up, pooled or projected."""

    def __init__(self, chosen: ResolvedTables, to_width: FeatureProjections):
        self._table_of = {feature: table.name for feature, table in chosen.table_of.items()}
        self._pooling = chosen.pooling
        self._to_width = to_width
        for feature, how in chosen.pooling.items():
            if how == "weighted":
                raise UserError(
                    "list features of a dataset contain ids without weights",
                    option=f"tables.{self._table_of[feature]}.pooling",
                    value=how,
                    remedy="use mean or sum; batches built by your own script can have weights (docs/own-model.md)",
                )

    def from_unique_rows(
        self, feature: str, batch: MicroBatch, rows: Mapping[str, TableRows], index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the (*positions, model width) vectors of a feature in training.

        Args:
            feature: Name of the feature.
            batch: The micro-batch.
            rows: Unique rows of each table.
            index: For each feature, the index of each key into the unique rows of its table (inverse indices).
        """
        if feature not in self._table_of:
            return self._of_numbers(feature, batch)
        table = self._table_of[feature]
        if feature in self._pooling:
            vectors = self._pooled(feature, batch, rows[table], index[feature])
        else:
            vectors = gather_rows(rows[table], index[feature])
        return self._to_width(table, vectors)  # type: ignore[no-any-return]

    def from_lookup(self, feature: str, batch: MicroBatch, vectors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the same vectors from the results of `EmbeddingEngine.lookup_readonly`, for evaluation and export."""
        if feature not in self._table_of:
            return self._of_numbers(feature, batch)
        looked_up = vectors[feature]
        if feature in self._pooling:
            looked_up = self._pooled(feature, batch, looked_up, torch.arange(len(looked_up), device=looked_up.device))
        return self._to_width(self._table_of[feature], looked_up)  # type: ignore[no-any-return]

    def _of_numbers(self, feature: str, batch: MicroBatch) -> torch.Tensor:
        return self._to_width(feature, batch.tensors[feature].to(self._to_width.dtype))  # type: ignore[no-any-return]

    def _pooled(self, feature: str, batch: MicroBatch, rows: TableRows, index_P: torch.Tensor) -> torch.Tensor:
        return pool_bags(rows, index_P, batch.tensors[feature + OFFSETS], self._pooling[feature])


_CHUNK_ITEMS = 1 << 14
VectorOf = Callable[[str], torch.Tensor]
"""Function that returns the vectors of a feature."""


def prefix_vectors(
    names: Sequence[str], batch: MicroBatch, of: VectorOf, tokens_per_event: int = 1
) -> torch.Tensor | None:
    """Return the (B, P, D) prefix tokens of sequences, one per column; None if there are no columns.

    The columns are user features, whose values are equal at all events of a sequence.
    """
    if not names:
        return None
    first_B = batch.tensors["offsets"][:-1] // tokens_per_event
    vectors = [of(name) for name in names]
    return torch.stack([v.index_select(0, first_B.clamp(max=len(v) - 1)) for v in vectors], dim=1)


class ItemTower:
    """Item vectors and history tokens of a retrieval model."""

    def __init__(self, model: RetrievalModel, inputs: RetrievalInputs, vectors: FeatureLookup, num_items: int):
        self._model = model
        self._inputs = inputs
        self._vectors = vectors
        self.num_items = num_items
        columns = [c.name for c in (*inputs.token_columns, *inputs.context_columns)]
        self._of_token = [name for name in columns if name not in inputs.prefix]

    def training_inputs(
        self, batch: MicroBatch, rows: Mapping[str, TableRows], index: Mapping[str, torch.Tensor]
    ) -> tuple[TableRows, Mapping[str, torch.Tensor], torch.Tensor, torch.Tensor | None]:
        """Return the training inputs of a micro-batch.

        Returns:
            The item vectors, the index of each use of an item into them, the (T, D) history tokens, and the
            (B, P, D) prefix tokens or None.
        """

        def of(feature: str) -> torch.Tensor:
            return self._vectors.from_unique_rows(feature, batch, rows, index)

        items = self._model.item_rows(rows["items"])
        if self._inputs.has_item_features:
            items = self._pair(of)
            at = {n.removeprefix(AT): t for n, t in batch.tensors.items() if n.startswith(AT)}
            index = {**index, **at}
        prefix = prefix_vectors(self._inputs.prefix, batch, of)
        return items, index, self._tokens(gather_rows(items, index["history"]), of), prefix

    @torch.no_grad()
    def states(self, engine: EmbeddingEngine, batch: MicroBatch) -> torch.Tensor:
        """Return the (T, D) query vectors of the tokens of a batch in evaluation mode. Collective."""
        batch = self._inputs.add_item_features(batch, None, 0)
        looked_up = engine.lookup_readonly(batch.keys)
        if batch.num_tokens == 0:
            return next(iter(looked_up.values())).new_zeros(0, self._model.dim)
        moved = on_device(batch, engine.device)

        def of(feature: str) -> torch.Tensor:
            return self._vectors.from_lookup(feature, moved, looked_up)

        if self._inputs.has_item_features:
            history_TD = self._pair(of).index_select(0, moved.tensors[AT + "history"])
        else:
            history_TD = self._vectors.from_lookup("history", moved, looked_up)
        self._model.eval()
        prefix = prefix_vectors(self._inputs.prefix, moved, of)
        states: torch.Tensor = self._model(self._tokens(history_TD, of), sequence_info(moved), prefix)
        self._model.train()
        return states

    @torch.no_grad()
    def item_inputs(self, engine: EmbeddingEngine, items: NDArray[np.int64]) -> torch.Tensor:
        """Return the (items, D) vectors of items as inputs of a history. Collective."""
        if not self._inputs.has_item_features:
            feature = engine.tables["items"].feature_names[0]
            rows = engine.lookup_readonly({feature: items})[feature]
            return self._model.to_width("items", rows)  # type: ignore[no-any-return]
        batch = self._inputs.collate_items(items)
        looked_up = engine.lookup_readonly(batch.keys)
        moved = on_device(batch, engine.device)
        pair = self._pair(lambda feature: self._vectors.from_lookup(feature, moved, looked_up))
        return pair.index_select(0, moved.tensors[AT + "item"])

    @torch.no_grad()
    def candidate_vectors(self, content: torch.Tensor) -> torch.Tensor:
        """Return the vectors that queries are compared with, from the vectors that histories contain."""
        return self._model.item_vectors(content)

    def row_transform(self, engine: EmbeddingEngine) -> RowTransform:
        """Return the function that converts rows of the item table to candidate vectors, for `EmbeddingEngine.top_k`.

        Collective if items have features: each rank then computes the vectors of the items it owns in advance.
        """
        if not self._inputs.has_item_features:
            return lambda rows, keys: self.candidate_vectors(self._model.to_width("items", rows))
        topology = engine.topology
        owned = list[NDArray[np.int64]]()
        parts = list[torch.Tensor]()
        for start in range(1, self.num_items + 1, _CHUNK_ITEMS * topology.num_shards):
            keys = np.arange(start, min(start + _CHUNK_ITEMS * topology.num_shards, self.num_items + 1))
            local_keys = owned_keys(engine.tables["items"], topology, keys)
            owned.append(local_keys)
            parts.append(self._model.item_vectors(self.item_inputs(engine, local_keys)).detach())
        keys_O = torch.from_numpy(np.concatenate(owned)).to(engine.device)
        vectors_OD = torch.cat(parts)
        return lambda rows, keys: vectors_OD.index_select(0, torch.searchsorted(keys_O, keys))

    def _pair(self, of: VectorOf) -> torch.Tensor:
        """Return (2U, D) vectors: items with their id embedding, then the same items without it."""
        content_UD = sum_features([of(column.name) for column in self._inputs.item_columns])
        return torch.cat([content_UD + of("item"), content_UD])

    def _tokens(self, history_TD: torch.Tensor, of: VectorOf) -> torch.Tensor:
        return sum_features([history_TD, *(of(name) for name in self._of_token)]) if self._of_token else history_TD
