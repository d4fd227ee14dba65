"""The job that systems are compared on: batches and first rows as pure functions, with numpy alone.

Two tables of a million rows. Feature `item_seq` looks up a sequence of rows of table `t_seq`, feature `ctx_bag` a bag
of rows of `t_bag` that are summed. A rank has 256 samples a step; lengths are lognormal with mean 100, at most 512;
keys follow a Zipf law, and a fixed permutation spreads the popular ones over the table.
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
_ROWS_A_DRAW = 65536


@config
class WorkloadConfig:
    """The sizes of the job."""

    num_rows: int = 1_000_000
    """Rows of each of the two tables."""
    dim: int = 128
    """Of a row, and of the dense part."""
    batch: int = 256
    """Samples of a rank and step."""
    mean_length: float = 100.0
    """Of a feature, before lengths are cut."""
    sigma: float = 1.0
    """Of the logarithm of a length."""
    max_length: int = 512
    """Longer samples are cut."""
    zipf: float = 1.05
    """Exponent of the popularity of keys."""
    num_dense: int = 13
    """Dense inputs of a sample."""
    num_layers: int = 2
    """Layers of the transformer (dense part `bucket`)."""
    num_heads: int = 4
    """Heads of its attention."""
    ffn_dim: int = 512
    """Width of its feed-forward layers."""
    seed: int = 2024
    """Of batches, first rows and the dense part."""


@dataclass(frozen=True, slots=True)
class PeersBatch:
    """The samples of a rank and step."""

    keys: dict[str, torch.Tensor]
    """Feature to the int64 keys of all samples, one sample after the other."""
    lengths: dict[str, torch.Tensor]
    """Feature to the (B,) numbers of keys of the samples."""
    dense: torch.Tensor
    """(B, num_dense) float32."""
    label: torch.Tensor
    """(B,) float32, 0 or 1: whether the sample's first item is odd, one in five turned round."""


class PeersWorkload:
    """Batches by rank and step, and first rows by table."""

    def __init__(self, cfg: WorkloadConfig) -> None:
        self.cfg = cfg
        mass = np.cumsum(np.arange(1, cfg.num_rows + 1, dtype=np.float64) ** -cfg.zipf)
        self._popularity = mass / mass[-1]
        self._key_of_place = [
            np.random.default_rng([cfg.seed, _PERMUTATION_SEED, t]).permutation(cfg.num_rows) for t in range(2)
        ]

    def batch(self, rank: int, step: int) -> PeersBatch:
        """A pure function of seed, rank and step."""
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
        """(high - low, dim) float32 weights that rows low to high of a table begin with, however it is sharded."""
        rows = np.empty((high - low, self.cfg.dim), np.float32)
        for block in range(low // _ROWS_A_DRAW, (high - 1) // _ROWS_A_DRAW + 1):
            draw = np.random.default_rng([self.cfg.seed, _ROWS_SEED, table, block])
            values = draw.random((_ROWS_A_DRAW, self.cfg.dim), dtype=np.float32)
            values -= 0.5
            values *= 0.02
            start = block * _ROWS_A_DRAW
            first = max(low, start)
            end = min(high, start + _ROWS_A_DRAW)
            rows[first - low : end - low] = values[first - start : end - start]
        return torch.from_numpy(rows)

    def fingerprint(self, num_ranks: int = 2, num_steps: int = 3) -> str:
        """The same text for the same batches: what two systems compare before they compare figures."""
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
        place = np.searchsorted(self._popularity, draw.random(num_keys), side="right")
        keys: NDArray[np.int64] = self._key_of_place[table][np.minimum(place, self.cfg.num_rows - 1)].astype(np.int64)
        return keys
