"""The layout of batch rows, written in runs, equals a layout computed per token."""

import numpy as np
import pytest

from nestrec.serving.engine.batch_layout import _write_rows
from nestrec.serving.model.model_adapter import HistoryTokens
from nestrec.serving.model.request_inputs import History

PAGE = 16


def reference_layout(parts, pages, tokens_per_event, num_rows):
    """Return (token, position, slot) of each history row, and the number of records."""
    found = []
    record = 0
    for first, end, stored, _, first_page, _, before in parts:
        for token in range(first, end):
            second = token >= before and (token - before) % tokens_per_event == 1
            slot = pages[first_page + token // PAGE] * PAGE + token % PAGE if token < stored else -1
            found.append((2 * record + second, token, slot))
            record += second or token < before or tokens_per_event == 1
    return np.array(found).reshape(-1, 3), record


def random_parts(rng, tokens_per_event, before):
    parts, pages = [], []
    for _ in range(rng.integers(1, 5)):
        total = before + tokens_per_event * int(rng.integers(1, 60))
        first, end = sorted(rng.choice([*range(before), *range(before, total + 1, tokens_per_event)], 2).tolist())
        stored = max(first, min(int(rng.integers(0, total + 1)), end))
        parts.append((first, end, stored, int(rng.integers(0, 9)), len(pages), -(-first // PAGE), before))
        pages += rng.integers(0, 1000, -(-total // PAGE)).tolist()
    return parts, pages


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("tokens_per_event", [1, 2])
def test_batch_layout_indices_match_tokens(tokens_per_event, before):
    rng = np.random.default_rng(before)
    for _ in range(60):
        parts, pages = random_parts(rng, tokens_per_event, before)
        history, num_queries = sum(end - first for first, end, *_ in parts), sum(part[3] for part in parts)
        token, position, slot = (np.full(history + num_queries + 5, 77, np.int32) for _ in range(3))
        used = np.full(sum(p[5] for p in parts) + 2, 77, np.int32)
        row, record = np.full((2, num_queries + 3), 77, np.int32)
        _write_rows(np.array(parts), np.array(pages), PAGE, tokens_per_event, token, position, slot, used, row, record)
        expected, records = reference_layout(parts, pages, tokens_per_event, history)
        np.testing.assert_array_equal(np.stack([token, position, slot])[:, :history].T, expected)
        np.testing.assert_array_equal(row[:num_queries], history + np.arange(num_queries))
        np.testing.assert_array_equal(record[:num_queries], records + np.arange(num_queries))
        np.testing.assert_array_equal(token[history : history + num_queries], 2 * record[:num_queries])
        assert (slot[history:] == -1).all()
        assert not np.concatenate([token[history + num_queries :], row[num_queries:], record[num_queries:]]).any()


@pytest.mark.parametrize(("tokens_per_event", "num_before"), [(1, 0), (2, 0), (2, 3)])
def test_batch_layout_token_times_equal_event_times(tokens_per_event, num_before):
    times = np.sort(np.random.default_rng(1).integers(0, 2 * 10**12, 20))
    tokens = HistoryTokens(
        history=History(items=times, times_ms=times, actions=times), columns=(times,), times_ms=times,
        query_times_ms=np.roll(times, -1), num_cacheable=20, tokens_per_event=tokens_per_event,
        prefix_records=np.zeros((num_before, 1), np.int64), prefix_time_ms=int(times[0]),
    )  # fmt: skip
    for first, end in [(0, tokens.length), (num_before, tokens.length), (num_before + 4, num_before + 8), (0, 0)]:
        for event_times, expected in (
            (tokens.times_ms, tokens.token_times_ms(first, end)),
            (tokens.query_times_ms, tokens.token_query_times_ms(first, end)),
        ):
            found = np.full(end - first, -1.0)
            tokens.write_seconds(event_times, first, end, found)
            np.testing.assert_array_equal(found, expected / 1000.0)
