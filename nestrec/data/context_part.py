"""A part of the tokens of a micro-batch, for a rank that computes it together with the others of its context group.

Whole samples are assembled, the same on every rank of a group, and each keeps what belongs to its tokens: inputs,
targets and negatives. So what is drawn for a token does not depend on who computes it.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.data.batches import Assembler, KeysOfSamples, MicroBatch
from nestrec.data.dataset import Rows
from nestrec.ops.context.parts import TokenParts

SHARED = frozenset({"catalogue"})
"""keys that all tokens have together"""
_OFFSETS = "offsets"


def part_of(batch: MicroBatch, part: int, size: int, *, shared: Collection[str] = SHARED) -> MicroBatch:
    """What part `part` of `size` holds of a micro-batch. Keys and tensors have a row for each token, but for the
    offsets of its sequences and what is named as shared."""
    parts = TokenParts(np.diff(batch.tensors[_OFFSETS].numpy()), size)
    places = parts.places(part)
    at = torch.from_numpy(places)
    counts = {name: len(x) for name, x in batch.keys.items()} | {name: len(x) for name, x in batch.tensors.items()}
    for name, count in counts.items():
        assert name in shared or name == _OFFSETS or count == batch.num_tokens, name
    tensors = {
        name: tensor if name in shared else tensor[at] for name, tensor in batch.tensors.items() if name != _OFFSETS
    }
    return replace(
        batch,
        keys={name: keys if name in shared else keys[places] for name, keys in batch.keys.items()},
        tensors={**tensors, _OFFSETS: torch.from_numpy(parts.offsets(part))},
        num_tokens=len(places),
        parts=parts,
    )


class PartAssembler(Assembler):
    """Assembles parts of samples; how many tokens they have, and what they weigh, is told of whole ones."""

    def __init__(self, whole: Assembler, part: int, size: int) -> None:
        self._whole, self._part, self._size = whole, part, size
        self.weights, self.tokens = whole.weights, whole.tokens
        self.shuffle_block, self.window_bounds = whole.shuffle_block, whole.window_bounds

    def tokens_in(self, samples: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return self._whole.tokens_in(samples, epoch)

    def weight(self, samples: NDArray[np.int64], epoch: int) -> float:
        return self._whole.weight(samples, epoch)

    def read(self, samples: NDArray[np.int64]) -> Rows:
        return self._whole.read(samples)

    def sample_keys(self, samples: NDArray[np.int64], rows: Rows, epoch: int) -> KeysOfSamples | None:
        return self._whole.sample_keys(samples, rows, epoch)

    def assemble(self, samples: NDArray[np.int64], rows: Rows, epoch: int) -> MicroBatch:
        return part_of(self._whole.assemble(samples, rows, epoch), self._part, self._size)
