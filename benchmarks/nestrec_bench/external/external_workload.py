"""Workload of the comparison: batches and initial rows as pure functions, computed only with numpy.

There are two tables of a million rows each. Feature `item_seq` looks up a sequence of rows of table `t_seq`. Feature
`ctx_bag` looks up a bag of rows of `t_bag`, which are summed. A rank has 256 samples per step. Lengths are lognormal
with mean 100 and maximum 512. Keys have a Zipf distribution; a fixed permutation spreads the popular ones over the
table.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config

SEQUENCE, BAG = "item_seq", "ctx_bag"
SEQUENCE_TABLE, BAG_TABLE = "t_seq", "t_bag"
TABLE_OF = {SEQUENCE: SEQUENCE_TABLE, BAG: BAG_TABLE}
_PERMUTATION_SEED, _ROWS_SEED = 77, 999
_ROWS_PER_DRAW = 65536


@config
class WorkloadConfig:
    """Sizes and random seed of the workload."""

    num_rows: int = 1_000_000
    """Number of rows of each of the two tables."""
    dim: int = 128
    """Dimension of embeddings and of the dense part."""
    batch: int = 256
    """Number of samples per rank and step."""
    mean_length: float = 100.0
    """Mean number of keys of a feature, before truncation."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of a length."""
    max_length: int = 512
    """Length to which longer samples are truncated."""
    zipf: float = 1.05
    """Exponent of the Zipf distribution of keys."""
    num_dense: int = 13
    """Number of dense inputs per sample."""
    num_layers: int = 2
    """Number of layers of the transformer (dense part `bucket`)."""
    num_heads: int = 4
    """Number of attention heads of the transformer."""
    ffn_dim: int = 512
    """Width of the feed-forward layers of the transformer."""
    seed: int = 2024
    """Random seed of batches, initial rows and the dense part."""


@dataclass(frozen=True, slots=True)
class PeersBatch:
    """Samples of one rank and step."""

    keys: dict[str, torch.Tensor]
    """Feature to the concatenated int64 keys of all samples."""
    lengths: dict[str, torch.Tensor]
    """Feature to the numbers of keys of the samples, (B,)."""
    dense: torch.Tensor
    """(B, num_dense) float32."""
    label: torch.Tensor
    """(B,) float32, 0 or 1: whether the first item of the sample is odd; one label in five is flipped."""


class PeersWorkload:
    """Batches by rank and step, and initial rows by table."""

    def __init__(self, cfg: WorkloadConfig) -> None:
        self.cfg = cfg
        mass = np.cumsum(np.arange(1, cfg.num_rows + 1, dtype=np.float64) ** -cfg.zipf)
        self._popularity = mass / mass[-1]
        self._key_of_popularity_rank = [
            np.random.default_rng([cfg.seed, _PERMUTATION_SEED, t]).permutation(cfg.num_rows) for t in range(2)
        ]

    def batch(self, rank: int, step: int) -> PeersBatch:
        """Return the batch of a rank and step, a pure function of seed, rank and step."""
        draw = np.random.default_rng([self.cfg.seed, rank, step])
        keys, lengths = {}, {}
        for number, feature in enumerate(TABLE_OF):
            lengths[feature] = self._lengths(draw)
            keys[feature] = self._keys(draw, number, int(lengths[feature].sum()))
        dense = draw.standard_normal((self.cfg.batch, self.cfg.num_dense), dtype=np.float32)
        first = keys[SEQUENCE][np.cumsum(lengths[SEQUENCE]) - lengths[SEQUENCE]]
        is_odd = (first % 2).astype(np.float32)
        label = np.where(draw.random(self.cfg.batch) < 0.2, 1 - is_odd, is_odd).astype(np.float32)
        return PeersBatch(
            keys={name: torch.from_numpy(k) for name, k in keys.items()},
            lengths={name: torch.from_numpy(n) for name, n in lengths.items()},
            dense=torch.from_numpy(dense),
            label=torch.from_numpy(label),
        )

    def first_rows(self, table: int, low: int, high: int) -> torch.Tensor:
        """Return the initial weights of the rows [low, high) of a table, (high - low, dim) float32.

        They do not depend on the sharding of the table.
        """
        rows = np.empty((high - low, self.cfg.dim), np.float32)
        for block in range(low // _ROWS_PER_DRAW, (high - 1) // _ROWS_PER_DRAW + 1):
            draw = np.random.default_rng([self.cfg.seed, _ROWS_SEED, table, block])
            values = draw.random((_ROWS_PER_DRAW, self.cfg.dim), dtype=np.float32)
            values -= 0.5
            values *= 0.02
            start = block * _ROWS_PER_DRAW
            first = max(low, start)
            end = min(high, start + _ROWS_PER_DRAW)
            rows[first - low : end - low] = values[first - start : end - start]
        return torch.from_numpy(rows)

    def fingerprint(self, num_ranks: int = 2, num_steps: int = 3) -> str:
        """Return a hash of the batches, by which two systems verify that their workloads are the same."""
        digest = hashlib.sha256()
        for rank in range(num_ranks):
            for step in range(num_steps):
                batch = self.batch(rank, step)
                parts = [part for f in TABLE_OF for part in (batch.keys[f], batch.lengths[f])]
                for part in (*parts, batch.dense, batch.label):
                    digest.update(part.numpy().tobytes())
        return digest.hexdigest()[:16]

    def _lengths(self, draw: np.random.Generator) -> NDArray[np.int64]:
        cfg = self.cfg
        mean_of_log = math.log(cfg.mean_length) - 0.5 * cfg.sigma**2
        lengths = np.rint(draw.lognormal(mean_of_log, cfg.sigma, cfg.batch)).astype(np.int64)
        return np.clip(lengths, 1, cfg.max_length)

    def _keys(self, draw: np.random.Generator, table: int, num_keys: int) -> NDArray[np.int64]:
        rank = np.searchsorted(self._popularity, draw.random(num_keys), side="right")
        rank = np.minimum(rank, self.cfg.num_rows - 1)
        keys: NDArray[np.int64] = self._key_of_popularity_rank[table][rank].astype(np.int64)
        return keys
