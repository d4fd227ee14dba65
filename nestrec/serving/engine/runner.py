"""One batch of serving work on the device: new tokens of many users against their prefixes."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.models.segments import Forward, KeysAndValues, Segment
from nestrec.serving.model.forms import Form, Tokens
from nestrec.serving.model.inputs import Candidates
from nestrec.serving.prefix.page_pool import PagePool


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is computed for one user in a batch."""

    tokens: Tokens
    first: int
    """tokens that the pages hold already"""
    end: int
    """tokens that will have been computed"""
    pages: list[int]
    """of the user's entry"""
    store_until: int
    """new tokens before this one are written to the pages"""
    candidates: Candidates | None = None

    @property
    def num_candidates(self) -> int:
        return len(self.candidates) if self.candidates is not None else 0

    @property
    def num_new(self) -> int:
        """Tokens that are computed, candidates included."""
        return self.end - self.first + self.num_candidates

    @property
    def extent(self) -> tuple[int, int, int]:
        """(prefix, new history, candidates) for the cost model"""
        return self.first, self.end - self.first, self.num_candidates


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of a part's candidates, on the host."""

    items: NDArray[np.int64]
    scores: NDArray[np.float32]
    """(items, outputs)"""


@dataclass(frozen=True, slots=True)
class Launched:
    """A batch on its way."""

    wait: Callable[[], tuple[list[Scored | None], float]]
    """its results, once the device is done with it, and the seconds that it took there"""
    is_done: Callable[[], bool] = lambda: True
    """whether `wait` would return at once"""


class BatchRunner(Protocol):
    """Runs batches one after the other."""

    @property
    def form(self) -> Form: ...

    @property
    def pool(self) -> PagePool: ...

    depth: int
    """batches that may be on their way at once"""
    warm_events: int
    """longest history to warm up with"""
    row_step: int
    """rows of a batch that cost no more than fewer: whole multiples of it are best"""
    spins: bool
    """whether a thread that waits for batches keeps its core busy"""

    def launch(self, parts: Sequence[Part]) -> Launched: ...

    def weights_changed(self) -> None:
        """The dense weights have other values, in the same places."""
        ...


class Runner:
    """Runs any model anywhere, sequence by sequence inside a batch: the twin of the faster runners."""

    depth: int = 1
    warm_events: int = 256
    row_step: int = 1
    spins: bool = False

    def __init__(self, form: Form, pool: PagePool, forward: Forward | None = None):
        """forward: instead of the backbone's cached forward."""
        self.form, self.pool, self._forward = form, pool, forward or form.servable.cached.forward

    def launch(self, parts: Sequence[Part]) -> Launched:
        start_s = time.perf_counter()
        results = self.run(parts)
        if self.form.servable.device.type == "cuda":  # a batch of signals returns before the device is done
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start_s
        return Launched(lambda: (results, seconds))

    def weights_changed(self) -> None:
        """It holds nothing that was made of them."""

    @torch.inference_mode()
    def run(self, parts: Sequence[Part]) -> list[Scored | None]:
        """Scores of each part with candidates; none for the others."""
        states = self.states(parts)
        counts = [part.end - part.first for part in parts]
        last = [state[count - 1] if count else None for state, count in zip(states, counts, strict=True)]
        behind = [state[count:] for state, count in zip(states, counts, strict=True)]
        return found_by_states(self.form, parts, last, behind)

    @torch.inference_mode()
    def states(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """(new tokens, D) of each part: of its history, then of its candidates where they are tokens."""
        appended = int(self.form.appends_candidates)
        counts = [part.end - part.first + appended * part.num_candidates for part in parts]
        bounds, made = list(itertools.accumulate(counts, initial=0)), list[KeysAndValues]()
        servable = self.form.servable
        state_TD = torch.zeros(0, servable.encoder_config.dim, dtype=servable.dtype, device=servable.device)
        if bounds[-1]:
            segments = [self._segment(part, count) for part, count in zip(parts, counts, strict=True)]
            state_TD, made = self._forward(
                self.form.encoder,
                torch.cat([self._vectors(part) for part in parts]),
                segments,
                lambda layer, b: self.pool.read(layer, parts[b].pages if parts[b].first else [], parts[b].first),
            )
        for part, start in zip(parts, bounds[:-1], strict=True):
            self._store(part, start, made)
        return [state_TD[start:end] for start, end in itertools.pairwise(bounds)]

    def _vectors(self, part: Part) -> torch.Tensor:
        history = self.form.vectors(part.tokens, part.first, part.end)
        if part.candidates is None:
            return history
        return torch.cat([history, self.form.candidate_tokens(part.candidates)])

    def _segment(self, part: Part, num_tokens: int) -> Segment:
        device = self.form.servable.device
        num_history = part.end - part.first
        return Segment(
            prefix_length=part.first,
            num_history=num_history,
            num_candidates=num_tokens - num_history,
            time_K=part.tokens.time_T[: part.end].to(device),
            query_time_S=part.tokens.query_time_T[part.first : part.end].to(device),
            candidate_time_s=part.candidates.now_ms / 1000.0 if part.candidates is not None else 0.0,
            cut=part.tokens.cut,
        )

    def _store(self, part: Part, start: int, made: list[KeysAndValues]) -> None:
        count = min(part.store_until, part.end) - part.first
        if count > 0:
            for layer, (keys, values) in enumerate(made):
                self.pool.write(
                    layer, part.pages, part.first, keys[start : start + count], values[start : start + count]
                )


def found_by_states(
    form: Form,
    parts: Sequence[Part],
    last: Sequence[torch.Tensor | None],
    candidates: Sequence[torch.Tensor] | None = None,
) -> list[Scored | None]:
    """Scores of each part with candidates, and the best of the catalogue for all who ask for them at once.

    last: (D,) state of a user's last token. candidates: (C, D) of those that are tokens of their own.
    """
    asking = [b for b, part in enumerate(parts) if part.candidates is not None and part.candidates.num_best]
    wanted = [asked for b in asking if (asked := parts[b].candidates) is not None]
    best = dict(zip(asking, form.best(wanted, [last[b] for b in asking]) if asking else [], strict=True))
    results = list[Scored | None]()
    for b, part in enumerate(parts):
        if part.candidates is None:
            results.append(None)
        elif b in best:
            results.append(Scored(*best[b]))
        else:
            state_CD = torch.zeros(0) if candidates is None else candidates[b]
            scores = form.scores(part.candidates, last[b], state_CD)
            results.append(Scored(part.candidates.items, scores.cpu().numpy()))
    return results
