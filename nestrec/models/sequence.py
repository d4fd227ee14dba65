"""What an encoder knows of a batch besides its vectors."""

from dataclasses import dataclass

import torch

from nestrec.ops.context.ring_sum import Context


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """Jagged layout of a batch of sequences, and the keys and times of its tokens.

    T tokens, B sequences. All tensors lie on the device of the vectors.
    """

    offsets: torch.Tensor
    """(B + 1,) int64"""
    max_length: int
    """longest sequence of the batch, known on the host"""
    position_T: torch.Tensor
    """int64, position in its sequence, from 0"""
    token_key_T: torch.Tensor
    """int64 keys of the counter-based generator: (run seed, epoch, sample id, position)"""
    time_T: torch.Tensor | None = None
    """float64 seconds of each event"""
    query_time_T: torch.Tensor | None = None
    """float64 seconds at which each token asks: the time of the event it predicts, or its own"""
    num_targets_B: torch.Tensor | None = None
    """int64; so many last tokens of each sequence are candidates, which do not see each other"""
    cut_B: torch.Tensor | None = None
    """int64 first token of each sequence that layers behind a cut compute; none: as its length has it"""
    buckets: torch.Tensor | None = None
    """time buckets of all pairs of tokens, once layers that read them have been told (ops.attention.hstu_op)"""
    context: Context | None = None
    """where only a part of each sequence is here: all else is told of the tokens of this part, but for `max_length`,
    which is that of whole sequences, and attention asks the others for theirs"""
