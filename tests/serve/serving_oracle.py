"""Reference scores from the training-time model, one sequence per candidate, without KV cache or serving code."""

import numpy as np
import torch

from nestrec.data.flat_arrays import history_start
from nestrec.models.heads import RankingModel
from nestrec.models.sequence import SequenceInfo


def oracle_scores(servable, history, candidates, slide_events):
    """Return the (C, K) scores of the candidates after a history that slides by `slide_events`."""
    if isinstance(servable.model, RankingModel):
        return _ranking(servable, history, candidates, slide_events)
    return _retrieval(servable, history, candidates, slide_events)


def _info(lengths, time, query_time):
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    position = torch.cat([torch.arange(n) for n in lengths])
    key = torch.zeros(len(position), dtype=torch.int64)
    return SequenceInfo(
        offsets=offsets,
        max_length=max(lengths),
        position_T=position,
        token_key_T=key,
        time_T=torch.from_numpy(time / 1e3),
        query_time_T=torch.from_numpy(query_time / 1e3),
    )


@torch.inference_mode()
def _retrieval(servable, history, candidates, slide_events):
    first = history_start(len(history), servable.spec.task.history.max_events, slide_events)
    items = history.items[first:]
    times = history.times_ms[first:]
    query_times = np.append(times[1:], candidates.now_ms)
    table = servable.tables["items"]
    state = servable.model(table.rows(torch.from_numpy(items)), _info([len(items)], times, query_times))[-1]
    vectors = servable.model.item_vectors(table.rows(torch.from_numpy(candidates.items)))
    return (vectors @ state)[:, None].numpy()


@torch.inference_mode()
def _ranking(servable, history, candidates, slide_events):
    first = history_start(len(history), servable.spec.task.history.max_events - 1, slide_events)
    items = history.items[first:]
    times = history.times_ms[first:]
    actions = history.actions[first:]
    tab = history.features["event_tab"][first:]
    content = []
    action = []
    time = []
    for c, item in enumerate(candidates.items):
        ids = torch.from_numpy(np.append(items, item))
        tabs = torch.from_numpy(np.append(tab, candidates.features["event_tab"][c]))
        content.append(servable.tables["items"].rows(ids) + servable.tables["event_tab"].rows(tabs))
        action.append(np.append(actions, 0))
        time.append(np.repeat(np.append(times, candidates.now_ms), 2))
    lengths = [2 * (len(items) + 1)] * len(candidates)
    times_T = np.concatenate(time)
    logits = servable.model(
        torch.cat(content), torch.from_numpy(np.concatenate(action)), _info(lengths, times_T, times_T)
    )
    return logits[len(items) :: len(items) + 1].numpy()
