"""Where the rows of a batch stand: written by runs, and the same as token by token."""

import numpy as np
import pytest

from nestrec.serving.engine.batch_layout import _write_rows
from nestrec.serving.model.model_adapter import HistoryTokens
from nestrec.serving.model.request_inputs import History

PAGE = 16


def token_by_token(parts, pages, tokens_an_event, num_rows):
    """(token, position, slot) of the rows of histories, and the number of their records."""
    found = []
    record = 0
    for first, end, stored, _, first_page, _, before in parts:
        for token in range(first, end):
            second = token >= before and (token - before) % tokens_an_event == 1
            slot = pages[first_page + token // PAGE] * PAGE + token % PAGE if token < stored else -1
            found.append((2 * record + second, token, slot))
            record += second or token < before or tokens_an_event == 1
    return np.array(found).reshape(-1, 3), record


def random_parts(rng, tokens_an_event, before):
    parts, pages = [], []
    for _ in range(rng.integers(1, 5)):
        total = before + tokens_an_event * int(rng.integers(1, 60))
        first, end = sorted(rng.choice([*range(before), *range(before, total + 1, tokens_an_event)], 2).tolist())
        stored = max(first, min(int(rng.integers(0, total + 1)), end))
        parts.append((first, end, stored, int(rng.integers(0, 9)), len(pages), -(-first // PAGE), before))
        pages += rng.integers(0, 1000, -(-total // PAGE)).tolist()
    return parts, pages


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("tokens_an_event", [1, 2])
def test_rows_of_histories_and_of_what_is_asked_for_stand_where_each_token_says(tokens_an_event, before):
    rng = np.random.default_rng(before)
    for _ in range(60):
        parts, pages = random_parts(rng, tokens_an_event, before)
        history, asked = sum(end - first for first, end, *_ in parts), sum(part[3] for part in parts)
        token, position, slot = (np.full(history + asked + 5, 77, np.int32) for _ in range(3))
        used, row, record = (
            np.full(sum(p[5] for p in parts) + 2, 77, np.int32),
            *np.full((2, asked + 3), 77, np.int32),
        )
        _write_rows(np.array(parts), np.array(pages), PAGE, tokens_an_event, token, position, slot, used, row, record)
        expected, records = token_by_token(parts, pages, tokens_an_event, history)
        np.testing.assert_array_equal(np.stack([token, position, slot])[:, :history].T, expected)
        np.testing.assert_array_equal(row[:asked], history + np.arange(asked))
        np.testing.assert_array_equal(record[:asked], records + np.arange(asked))
        np.testing.assert_array_equal(token[history : history + asked], 2 * record[:asked])
        assert (slot[history:] == -1).all()
        assert not np.concatenate([token[history + asked :], row[asked:], record[asked:]]).any()


@pytest.mark.parametrize(("tokens_an_event", "num_before"), [(1, 0), (2, 0), (2, 3)])
def test_seconds_of_tokens_are_those_of_their_events(tokens_an_event, num_before):
    times = np.sort(np.random.default_rng(1).integers(0, 2 * 10**12, 20))
    tokens = HistoryTokens(
        history=History(items=times, times_ms=times, actions=times), columns=(times,), times_ms=times,
        asked_ms=np.roll(times, -1), num_cacheable=20, tokens_an_event=tokens_an_event,
        before=np.zeros((num_before, 1), np.int64), before_ms=int(times[0]),
    )  # fmt: skip
    for first, end in [(0, tokens.length), (num_before, tokens.length), (num_before + 4, num_before + 8), (0, 0)]:
        for of_events, expected in (
            (tokens.times_ms, tokens.token_times_ms(first, end)), (tokens.asked_ms, tokens.token_asked_ms(first, end)),
        ):  # fmt: skip
            found = np.full(end - first, -1.0)
            tokens.write_seconds(of_events, first, end, found)
            np.testing.assert_array_equal(found, expected / 1000.0)
