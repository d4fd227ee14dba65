"""Statistics of lengths and popularity for the dataset card."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.data.card import BinnedCounts, LengthStatistics, PopularityStatistics


def length_statistics(lengths: NDArray[Any]) -> LengthStatistics:
    """Of the number of events of each user."""
    positive = lengths[lengths > 0]
    if not positive.size:
        return LengthStatistics()
    p50, p90, p99 = np.percentile(positive, [50, 90, 99])
    logs = np.log(positive)
    return LengthStatistics(
        mean=round(float(lengths.mean()), 4),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        max=int(lengths.max()),
        ln_mean=round(float(logs.mean()), 4),
        ln_sd=round(float(logs.std()), 4),
    )


def popularity_statistics(counts: NDArray[np.int64]) -> PopularityStatistics:
    """Of the number of events of each item; items without events are left out."""
    ranked = np.sort(counts[counts > 0])[::-1]
    if not ranked.size:
        return PopularityStatistics()
    return PopularityStatistics(
        zipf_s=round(zipf_exponent(ranked), 4),
        top_1_percent_share=round(_top_share(ranked, 0.01), 4),
        top_10_percent_share=round(_top_share(ranked, 0.10), 4),
    )


def zipf_exponent(ranked: NDArray[np.int64]) -> float:
    """Maximum likelihood s of p(r) ~ r^-s over exactly the given ranks, by Newton's method.

    The likelihood is concave in s: its slope is (mean of ln r under the model) minus (mean of ln r in the data).
    """
    if ranked.size < 2:
        return 0.0
    log_rank = np.log(np.arange(1, ranked.size + 1, dtype=np.float64))
    observed = float((ranked * log_rank).sum() / ranked.sum())
    s = 0.7
    for _ in range(50):
        weight = np.exp(-s * log_rank)
        weight /= weight.sum()
        mean = float((weight * log_rank).sum())
        variance = float((weight * log_rank**2).sum()) - mean**2
        step = (mean - observed) / max(variance, 1e-12)
        s = min(max(s + step, -10.0), 10.0)
        if abs(step) < 1e-9:
            break
    return s


def log_histogram(values: NDArray[Any], bins_per_decade: int = 10) -> BinnedCounts:
    """Histogram of positive integers in logarithmic bins; zeros are left out."""
    positive = values[values > 0]
    if not positive.size:
        return BinnedCounts()
    top = float(positive.max()) + 1
    num_steps = int(np.ceil(np.log10(top) * bins_per_decade)) + 1
    edges = np.unique(np.round(10 ** (np.arange(num_steps + 1) / bins_per_decade)).astype(np.int64))
    edges = edges[: int(np.searchsorted(edges, top)) + 1]
    counts = np.histogram(positive, bins=edges)[0]
    return BinnedCounts(edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))


def _top_share(ranked: NDArray[np.int64], share: float) -> float:
    top = max(1, round(ranked.size * share))
    return float(ranked[:top].sum() / ranked.sum())
