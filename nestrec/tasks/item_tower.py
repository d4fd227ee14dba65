"""The item tower: vectors of items from their ids and features.

The vectors of a feature at each place of a micro-batch: looked up, or pooled where a place has several ids.

Vectors of items and of the tokens of histories, for training, evaluation and export alike.

Legend: U distinct items, T tokens, D channels.
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
from nestrec.models.encoder_parts import FeatureProjections, summed
from nestrec.models.heads import RetrievalModel
from nestrec.ops.embedding.row_gather import TableRows, gather_rows, pool_bags
from nestrec.pipeline.exchange_window import on_device
from nestrec.tasks.table_overrides import ResolvedTables
from nestrec.tasks.task import sequence_info


class FeatureLookup:
    """What a task asks for the vectors of its features."""

    def __init__(self, chosen: ResolvedTables, to_width: FeatureProjections):
        self._table_of = {feature: table.name for feature, table in chosen.table_of.items()}
        self._pooling = chosen.pooling
        self._to_width = to_width
        for feature, how in chosen.pooling.items():
            if how == "weighted":
                raise UserError(
                    "lists of a dataset hold ids without weights",
                    option=f"tables.{self._table_of[feature]}.pooling",
                    value=how,
                    remedy="take mean or sum; batches of a script's own can be weighted (docs/own-model.md)",
                )

    def of(
        self, feature: str, batch: MicroBatch, rows: Mapping[str, TableRows], index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """(*places, model width), in training. rows: distinct ones of each table; index: places of keys in them."""
        if feature not in self._table_of:
            return self._of_numbers(feature, batch)
        table = self._table_of[feature]
        if feature in self._pooling:
            found = self._pooled(feature, batch, rows[table], index[feature])
        else:
            found = gather_rows(rows[table], index[feature])
        return self._to_width(table, found)  # type: ignore[no-any-return]

    def of_looked_up(self, feature: str, batch: MicroBatch, vectors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The same of the vectors of all keys, as `EmbeddingEngine.lookup_readonly` gives them."""
        if feature not in self._table_of:
            return self._of_numbers(feature, batch)
        found = vectors[feature]
        if feature in self._pooling:
            found = self._pooled(feature, batch, found, torch.arange(len(found), device=found.device))
        return self._to_width(self._table_of[feature], found)  # type: ignore[no-any-return]

    def _of_numbers(self, feature: str, batch: MicroBatch) -> torch.Tensor:
        return self._to_width(feature, batch.tensors[feature].to(self._to_width.dtype))  # type: ignore[no-any-return]

    def _pooled(self, feature: str, batch: MicroBatch, rows: TableRows, index_P: torch.Tensor) -> torch.Tensor:
        return pool_bags(rows, index_P, batch.tensors[feature + OFFSETS], self._pooling[feature])


_CHUNK_ITEMS = 1 << 14
VectorOf = Callable[[str], torch.Tensor]
"""Feature to its vectors."""


def prefix_vectors(
    names: Sequence[str], batch: MicroBatch, of: VectorOf, tokens_an_event: int = 1
) -> torch.Tensor | None:
    """(B, P, D) vectors of these columns, which every event of a sequence has alike; none where there are none."""
    if not names:
        return None
    first_B = batch.tensors["offsets"][:-1] // tokens_an_event
    vectors = [of(name) for name in names]
    return torch.stack([v.index_select(0, first_B.clamp(max=len(v) - 1)) for v in vectors], dim=1)


class ItemTower:
    """What a retrieval model is given for items and tokens."""

    def __init__(self, model: RetrievalModel, inputs: RetrievalInputs, vectors: FeatureLookup, num_items: int):
        self._model = model
        self._inputs = inputs
        self._vectors = vectors
        self.num_items = num_items
        columns = [c.name for c in (*inputs.token_columns, *inputs.context_columns)]
        self._of_token = [name for name in columns if name not in inputs.prefix]

    def read(
        self, batch: MicroBatch, rows: Mapping[str, TableRows], index: Mapping[str, torch.Tensor]
    ) -> tuple[TableRows, Mapping[str, torch.Tensor], torch.Tensor, torch.Tensor | None]:
        """In training: vectors of items, the place among them of each use of one, the (T, D) tokens, and what stands
        before each history."""

        def of(feature: str) -> torch.Tensor:
            return self._vectors.of(feature, batch, rows, index)

        items = self._model.item_rows(rows["items"])
        if self._inputs.has_item_features:
            items = self._pair(of)
            at = {n.removeprefix(AT): t for n, t in batch.tensors.items() if n.startswith(AT)}
            index = {**index, **at}
        prefix = prefix_vectors(self._inputs.prefix, batch, of)
        return items, index, self._tokens(gather_rows(items, index["history"]), of), prefix

    @torch.no_grad()
    def states(self, engine: EmbeddingEngine, batch: MicroBatch) -> torch.Tensor:
        """(T, D) queries of the tokens of a batch that is not trained on. Collective."""
        batch = self._inputs.with_items(batch, None, 0)
        found = engine.lookup_readonly(batch.keys)
        if batch.num_tokens == 0:
            return next(iter(found.values())).new_zeros(0, self._model.dim)
        moved = on_device(batch, engine.device)

        def of(feature: str) -> torch.Tensor:
            return self._vectors.of_looked_up(feature, moved, found)

        if self._inputs.has_item_features:
            history_TD = self._pair(of).index_select(0, moved.tensors[AT + "history"])
        else:
            history_TD = self._vectors.of_looked_up("history", moved, found)
        self._model.eval()
        prefix = prefix_vectors(self._inputs.prefix, moved, of)
        states: torch.Tensor = self._model(self._tokens(history_TD, of), sequence_info(moved), prefix)
        self._model.train()
        return states

    @torch.no_grad()
    def content(self, engine: EmbeddingEngine, items: NDArray[np.int64]) -> torch.Tensor:
        """(items, D) as histories hold them. Collective."""
        if not self._inputs.has_item_features:
            feature = engine.tables["items"].feature_names[0]
            rows = engine.lookup_readonly({feature: items})[feature]
            return self._model.to_width("items", rows)  # type: ignore[no-any-return]
        batch = self._inputs.of_items(items)
        found = engine.lookup_readonly(batch.keys)
        moved = on_device(batch, engine.device)
        pair = self._pair(lambda feature: self._vectors.of_looked_up(feature, moved, found))
        return pair.index_select(0, moved.tensors[AT + "item"])

    @torch.no_grad()
    def scored(self, content: torch.Tensor) -> torch.Tensor:
        """What queries meet of items' content."""
        return self._model.item_vectors(content)

    def compared(self, engine: EmbeddingEngine) -> RowTransform:
        """For `EmbeddingEngine.top_k`: from rows of the item table to what queries meet. Collective where items have
        features, of which each rank then computes those that it owns."""
        if not self._inputs.has_item_features:
            return lambda rows, keys: self.scored(self._model.to_width("items", rows))
        topology = engine.topology
        owned = list[NDArray[np.int64]]()
        parts = list[torch.Tensor]()
        for start in range(1, self.num_items + 1, _CHUNK_ITEMS * topology.num_shards):
            keys = np.arange(start, min(start + _CHUNK_ITEMS * topology.num_shards, self.num_items + 1))
            mine = owned_keys(engine.tables["items"], topology, keys)
            owned.append(mine)
            parts.append(self._model.item_vectors(self.content(engine, mine)).detach())
        keys_O = torch.from_numpy(np.concatenate(owned)).to(engine.device)
        vectors_OD = torch.cat(parts)
        return lambda rows, keys: vectors_OD.index_select(0, torch.searchsorted(keys_O, keys))

    def _pair(self, of: VectorOf) -> torch.Tensor:
        """(2U, D) items with their ids, then without."""
        content_UD = summed([of(column.name) for column in self._inputs.item_columns])
        return torch.cat([content_UD + of("item"), content_UD])

    def _tokens(self, history_TD: torch.Tensor, of: VectorOf) -> torch.Tensor:
        return summed([history_TD, *(of(name) for name in self._of_token)]) if self._of_token else history_TD
