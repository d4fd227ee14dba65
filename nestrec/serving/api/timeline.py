"""The last ten minutes of a server, a sample a second: what the charts of the live page are made of."""

from collections import deque
from typing import Any

import numpy as np

from nestrec.serving.api.engine_metrics import engine_status
from nestrec.serving.service import Service

STEP_S = 1.0
_MOST_SAMPLES = 600
_MOST_TIMES = 20_000
"""answers a sample whose times are kept"""
_SOURCES = ("none", "device", "dram")


class ServingTimeline:
    """Used inside one event loop."""

    def __init__(self, service: Service):
        self._service = service
        self._samples: deque[dict[str, Any]] = deque(maxlen=_MOST_SAMPLES)
        self._outcomes: dict[str, int] = {}
        self._times: list[float] = []
        self._before: dict[str, int] = {}
        self._device_s = 0.0

    def observe(self, outcome: str, seconds: float) -> None:
        """An answer."""
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        if outcome == "answered" and len(self._times) < _MOST_TIMES:
            self._times.append(seconds)

    def sample(self, now_s: float) -> None:
        """What has happened since the last one, and how things stand. now_s: Unix seconds."""
        outcomes, self._outcomes = self._outcomes, {}
        times, self._times = np.array(self._times), []
        states = [engine_status(self._service, role) for role in self._service.fleets]
        ranked = {source: sum(s["counts"].get(f"rank_{source}", 0) for s in states) for source in _SOURCES}
        busy_s = sum(state["device_s"] for state in states)
        quantiles = np.quantile(times, (0.5, 0.99)) * 1e3 if times.size else (None, None)
        exported = [state["exported_at_s"] for state in states if state["exported_at_s"] is not None]
        since = {f"from_{s}": max(0, n - self._before.get(s, 0)) for s, n in ranked.items()}  # a swap begins anew
        sample = {
            "at_s": now_s,
            "answered": outcomes.pop("answered", 0),
            "refused": outcomes.pop("refused", 0),
            "failed": sum(outcomes.values()),
            "p50_ms": quantiles[0],
            "p99_ms": quantiles[1],
            **since,
            "queued_ms": 1e3 * sum(state["queued_s"] for state in states),
            "device_busy": min(1.0, max(0.0, busy_s - self._device_s) / STEP_S),
            "device_cache": _share(states, "device_pages_used", "device_pages"),
            "dram_cache": _share(states, "dram_bytes_used", "dram_bytes"),
            "age_s": None if not exported else now_s - min(exported),
            "versions": "+".join(state["version"] for state in states),
        }
        self._samples.append(sample)
        self._before, self._device_s = ranked, busy_s

    def columns(self) -> dict[str, list[Any]]:
        """Of all samples, oldest first."""
        samples = list(self._samples)
        return {name: [sample[name] for sample in samples] for name in (samples[0] if samples else ())}


def _share(states: list[dict[str, Any]], used: str, of: str) -> float:
    return float(sum(state[used] for state in states) / max(1, sum(state[of] for state in states)))
