"""What users are multiplied with items by: the queries of a retrieval model, for many users in one whole pass.

Legend: B users, T events of all of them, D model width.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.transfer import to_device
from nestrec.models.sequence import SequenceInfo
from nestrec.serving.model.forms import Tokens
from nestrec.serving.model.inputs import History
from nestrec.serving.model.retrieval_form import RetrievalForm


@torch.inference_mode()
def user_queries(form: RetrievalForm, users: Sequence[tuple[History, int]]) -> torch.Tensor:
    """(B, D) for each (history, moment): its product with an item's vector is the item's score. Zeros for those
    without events."""
    device, tokens = form.servable.device, [form.tokens(history, now_ms) for history, now_ms in users]
    lengths = np.array([one.length for one in tokens], np.int64)
    queries_BD = torch.zeros(len(users), form.servable.encoder_config.dim, dtype=form.servable.dtype, device=device)
    there = np.flatnonzero(lengths)
    if len(there):
        known = [tokens[b] for b in there]
        # All at once: a look-up a user would take the device's time many times over in launches.
        fields = range(form.num_fields)
        records = [np.concatenate([_field(one, field) for one in known]) for field in fields]
        x_TD = form.content(form.records(np.stack(records, axis=1)))
        state_TD = form.encoder(x_TD, _info(known, lengths[there], device))
        last = to_device(np.cumsum(lengths[there]) - 1, device)
        queries_BD[to_device(there, device)] = form.query(state_TD[last])
    return queries_BD


def _field(tokens: Tokens, field: int) -> NDArray[np.int64]:
    """Of what stands before a history, and of its events."""
    own = tokens.columns[field]
    return np.concatenate([tokens.before[:, field], own]) if len(tokens.before) else own


def _info(tokens: Sequence[Tokens], lengths: NDArray[np.int64], device: torch.device) -> SequenceInfo:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position_T = to_device(np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths), device)
    return SequenceInfo(
        offsets=to_device(offsets, device),
        max_length=int(lengths.max()),
        position_T=position_T,
        token_key_T=torch.zeros_like(position_T),
        time_T=to_device(np.concatenate([one.token_times_ms(0, one.length) for one in tokens]) / 1000.0, device),
        query_time_T=to_device(np.concatenate([one.token_asked_ms(0, one.length) for one in tokens]) / 1000.0, device),
        cut_B=to_device(np.array([one.cut for one in tokens], np.int64), device),
    )
