"""Fits of the cost model to measured stages, for `nestrec bench prediction` and `nestrec bench calibrate`.

The loads are counted in the batches of the ranks. Each operation gets a linear cost in its amount, with non-negative
coefficients. The time of a collective starts when the last rank has entered it.

Exchanges are fitted to serial runs: their stages do not overlap, so the sum of the preceding durations is the start of
each exchange, which determines the fill level of the link's token bucket. Time that an exchange takes in addition to
the transfer of its bytes is local work, or variation of TCP.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.cost import non_negative_least_squares
from nestrec.data.batch_loader import Batch, MicroBatch
from nestrec.embedding import TableConfig
from nestrec.embedding.hashing import owner_of
from nestrec.embedding.table_config import layout_of
from nestrec.ops.embedding.dedup_host import dedup
from nestrec.planning.hardware_profile import ComputeRates, Group, LinearCost, Link, Links, Profile, StoreRates
from nestrec.planning.simulator.step_costs import Spread
from nestrec.planning.workload import KEY_BYTES, Amounts, Loads
from nestrec.trace import Span

Flops = Callable[[MicroBatch], tuple[float, float]]
"""Function from a micro-batch to its FLOPs that grow with tokens, and those that grow with squares of lengths."""


def counted_loads(
    batches_of_ranks: Sequence[Sequence[Batch]], tables: Sequence[TableConfig], flops: Flops, *, dense_bytes: float
) -> Loads:
    """Count the loads of the same steps on every rank, for one replica group without a window cache."""
    counted = [_step([batches[p] for batches in batches_of_ranks], tables) for p in range(len(batches_of_ranks[0]))]
    owned = [_owned([batches[p] for batches in batches_of_ranks], tables) for p in range(len(batches_of_ranks[0]))]
    work = [[[flops(part) for part in batch.micro_batches] for batch in batches] for batches in batches_of_ranks]
    operations = np.swapaxes(np.array(work, dtype=np.float64), 0, 1)
    world = len(batches_of_ranks)
    shared = [_shared(keys, owned[(p + 1) % len(owned)], tables, world) for p, keys in enumerate(owned)]
    fetched = [_sizes(keys, tables, world) for keys in owned]
    gradients = np.stack([f[2] for f in fetched])
    return Loads(
        linear_flops=operations[..., 0],
        attention_flops=operations[..., 1],
        dense_bytes=dense_bytes,
        keys=np.stack([step["keys"] for step in counted]),
        requested_keys=np.stack([step["requested"] for step in counted]),
        received_bytes=np.stack([step["received"] for step in counted]),
        returned_bytes=np.stack([step["received"] for step in counted]),
        served_bytes=np.stack([step["served"] for step in counted]),
        summed_bytes=np.stack([step["served"] for step in counted]),
        rows=np.stack([f[0] for f in fetched]),
        row_bytes=np.stack([f[1] for f in fetched]),
        gradient_bytes=gradients,
        completed_bytes=np.repeat(gradients[..., None], operations.shape[2], axis=2) / operations.shape[2],
        shared_rows=np.stack([s[0] for s in shared]),
        shared_bytes=np.stack([s[1] for s in shared]),
    )


def _step(batches: Sequence[Batch], tables: Sequence[TableConfig]) -> dict[str, Amounts]:
    """Count the amounts of the requesting ranks, and of the owners that serve them."""
    world = len(batches)
    num_micro_batches = len(batches[0].micro_batches)
    found = {name: np.zeros((world, num_micro_batches)) for name in ("requested", "received", "served")}
    keys = np.zeros(world)
    for source, batch in enumerate(batches):
        for n, part in enumerate(batch.micro_batches):
            for table in tables:
                values = _keys_of(part, table)
                distinct = dedup(values, world)
                width = table.dim * table.weight_dtype.itemsize
                keys[source] += len(values)
                found["requested"][source, n] += len(distinct.keys)
                found["received"][source, n] += len(distinct.keys) * width
                found["served"][:, n] += distinct.counts * width
    return {"keys": keys, **found}


def _keys_of(part: MicroBatch, table: TableConfig) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(part.keys[name]).reshape(-1) for name in table.feature_names])


def _owned(batches: Sequence[Batch], tables: Sequence[TableConfig]) -> Mapping[str, NDArray[np.int64]]:
    """Return the distinct keys of a global batch, by table."""
    parts = [part for batch in batches for part in batch.micro_batches]
    return {table.name: np.unique(np.concatenate([_keys_of(part, table) for part in parts])) for table in tables}


def _sizes(
    keys: Mapping[str, NDArray[np.int64]], tables: Sequence[TableConfig], world: int
) -> tuple[Amounts, Amounts, Amounts]:
    """Return the number of rows of each owner, their bytes, and the bytes of their gradients."""
    rows, row_bytes, gradient_bytes = np.zeros(world), np.zeros(world), np.zeros(world)
    for table in tables:
        count = np.bincount(owner_of(keys[table.name], world), minlength=world)
        rows += count
        row_bytes += count * layout_of(table).row_bytes
        gradient_bytes += count * table.dim * table.state_dtype.itemsize
    return rows, row_bytes, gradient_bytes


def _shared(
    now: Mapping[str, NDArray[np.int64]],
    following: Mapping[str, NDArray[np.int64]],
    tables: Sequence[TableConfig],
    world: int,
) -> tuple[Amounts, Amounts]:
    both = {name: np.intersect1d(keys, following[name], assume_unique=True) for name, keys in now.items()}
    return _sizes(both, tables, world)[:2]


StageTimes = Mapping[str, Mapping[tuple[int, int, int], float]]
"""Stage to (step, rank, micro-batch) to seconds."""


@dataclass(frozen=True, slots=True)
class StageObservations:
    """Measured stages of one configuration, their amounts, and the links that they used."""

    loads: Loads
    stages: StageTimes
    gb_per_s: float = 1.0
    """Bandwidth of a rank's link."""
    burst_bytes: float = 0.0
    """Number of bytes that a link transfers without delay after a pause."""

    def links(self) -> Links:
        """Return the links with their nominal bandwidth."""
        return Links((Link(name="link", ranks=0, gb_per_s=self.gb_per_s, burst_bytes=self.burst_bytes),))


def stage_times(spans: Iterable[Span]) -> dict[str, dict[tuple[int, int, int], float]]:
    """Return the seconds of each stage, from the spans of all ranks."""
    spans = [span for span in spans if span.kind in ("compute", "lookup", "communication") and span.step is not None]
    entered: dict[tuple[str, int | None, int | None], int] = defaultdict(int)
    for span in spans:
        stage = (span.name, span.step, span.micro_batch)
        entered[stage] = max(entered[stage], span.start_ns)
    found: dict[str, dict[tuple[int, int, int], float]] = defaultdict(dict)
    for span in spans:
        start = entered[span.name, span.step, span.micro_batch] if span.is_collective else span.start_ns
        assert span.step is not None
        found[span.name][span.step, span.rank, span.micro_batch or 0] = (span.end_ns - start) * 1e-9
    return found


def fit_profile(observed: Sequence[StageObservations], base: Profile, *, by_medians: bool = False) -> Profile:
    """Fit the rates of the observed stages.

    Args:
        observed: Measured stages of each configuration.
        base: Profile that contains the rates of all other stages.
        by_medians: Whether each configuration counts with its medians, so that a few disturbed stages have no effect.
            It requires that all stages of a configuration have about the same amount.
    """

    def line(stage: str, amount: str) -> LinearCost | None:
        by_configuration = [_pairs(one, stage, amount) for one in observed]
        if by_medians:
            by_configuration = [[tuple(np.median(pairs, axis=0))] for pairs in by_configuration if pairs]
        return fit_line([pair for pairs in by_configuration for pair in pairs])

    fetch, written = line("train.embedding.read_rows", "row_bytes"), line("train.embedding.write_back", "row_bytes")
    compute = line("train.forward_backward", "linear_flops")
    rates: dict[str, Any] = {
        "deduplicate": line("train.embedding.deduplicate", "keys"),
        "arrange": line("train.embedding.arrange", "requested_keys"),
        "update_rows": line("train.embedding.update", "row_bytes"),
        "intersect": line("train.embedding.intersect", "rows"),
        "copy": line("train.embedding.copy_shared_rows", "shared_bytes"),
        "dense_apply": line("train.dense.update", "dense_bytes"),
    }
    found = replace(base, **{name: rate for name, rate in rates.items() if rate is not None})
    if fetch is not None:
        found = replace(found, dram=StoreRates(fetch=fetch, write_back=written or LinearCost()))
    if compute is not None:
        found = replace(found, compute=ComputeRates(fixed_s=compute.fixed_s, flop_s=compute.unit_s))
    return found


def fit_line(pairs: Sequence[tuple[float, float]]) -> LinearCost | None:
    """Fit a line with non-negative coefficients to pairs of (seconds, amount). None: there are no pairs."""
    if not pairs:
        return None
    seconds, amounts = np.array(pairs).T
    fixed, unit = non_negative_least_squares(np.stack([np.ones_like(amounts), amounts], axis=1), seconds)
    return LinearCost(fixed_s=fixed, unit_s=unit)


def ratios_of(observed: Sequence[StageObservations], stage: str, amount: str, rate: LinearCost) -> NDArray[np.float64]:
    """Return the ratios of measured to fitted times of a stage."""
    pairs = np.array([pair for one in observed for pair in _pairs(one, stage, amount)])
    found: NDArray[np.float64] = pairs[:, 0] / (rate.fixed_s + rate.unit_s * pairs[:, 1])
    return found


def _pairs(one: StageObservations, stage: str, amount: str) -> list[tuple[float, float]]:
    """Return (seconds, amount) of every run of a stage."""
    pairs = []
    values = getattr(one.loads, amount)
    for (step, rank, part), seconds in one.stages.get(stage, {}).items():
        if isinstance(values, float):
            pairs.append((seconds, values))
            continue
        rank_values = values[one.loads.pattern_index(step)][rank]
        is_part = np.ndim(rank_values) == 1 and stage in _BY_PART
        pairs.append((seconds, float(rank_values[part]) if is_part else float(np.sum(rank_values))))
    return pairs


_BY_PART = ("train.forward_backward", "train.embedding.exchange_vectors", "train.embedding.exchange_gradients")


_SMALL_S = 1.5e-3
"""Transfer time that divides exchanges: shorter ones fit the local work of an exchange, longer ones the links."""


@dataclass(frozen=True, slots=True)
class TimedExchange:
    """An exchange of a serial run."""

    kind: str
    """Payload: keys, vectors, gradients or dense."""
    measured_s: float
    num_bytes: float
    """Number of bytes that a rank sends."""
    bytes_s: float
    """Transfer time of the bytes if the token bucket is empty."""
    waited_s: float
    """Part of `bytes_s` that the tokens in the bucket did not cover."""


@dataclass(frozen=True, slots=True)
class WorldFit:
    """Fitted exchanges for one number of ranks."""

    work: dict[str, LinearCost]
    """Local work of an exchange, by kind."""
    spread: Spread
    """Ratio of measured to nominal transfer time, by bytes."""


def exchanges_of(observed: StageObservations) -> Iterable[TimedExchange]:
    """Yield all exchanges of a serial run, rank by rank, in order of time."""
    world = observed.loads.world
    parts = observed.loads.num_micro_batches
    links = observed.links()
    burst_s = observed.burst_bytes / (observed.gb_per_s * 1e9)
    steps = sorted({step for step, _, _ in observed.stages["train.forward_backward"]})
    for rank in range(world):
        now = 0.0
        sent = -np.inf
        for step in steps:
            for name, part, kind in _order(parts):
                seconds = observed.stages[name][step, rank, part]
                if kind:
                    bytes_s = _bytes_s(observed, links, kind, (step, rank, part))
                    sent = max(sent, now - burst_s) + bytes_s
                    num_bytes = bytes_s * observed.gb_per_s * 1e9
                    yield TimedExchange(kind, seconds, num_bytes, bytes_s, max(0.0, sent - now))
                now += seconds


def _order(parts: int) -> list[tuple[str, int, str]]:
    """Return the stages of a serial step: name, micro-batch, and the kind of exchange, empty for other stages."""
    order = [("train.embedding.exchange_keys", 0, "keys"), ("train.embedding.read_rows", 0, "")]
    for part in range(parts):
        order += [
            ("train.embedding.exchange_vectors", part, "vectors"),
            ("train.forward_backward", part, ""),
            ("train.embedding.exchange_gradients", part, "gradients"),
        ]
    return [
        *order,
        ("train.dense.all_reduce", 0, "dense"),
        ("train.dense.update", 0, ""),
        ("train.embedding.update", 0, ""),
        ("train.embedding.write_back", 0, ""),
    ]


def _bytes_s(observed: StageObservations, links: Links, kind: str, stage: tuple[int, int, int]) -> float:
    step, rank, part = stage
    loads = observed.loads
    p = observed.loads.pattern_index(step)
    everyone = Group(observed.loads.world)
    if kind == "dense":
        return float(links.all_reduce_s(everyone, loads.dense_bytes))
    if kind == "keys":
        return float(links.all_to_all_s(everyone, float(loads.requested_keys[p][rank].sum()) * KEY_BYTES))
    amounts = (loads.served_bytes, loads.received_bytes)
    return float(links.all_to_all_s(everyone, max(float(amount[p][rank, part]) for amount in amounts)))


def fit_world(observed: Sequence[StageObservations], cores: int) -> WorldFit:
    """Fit exchanges to the serial runs of one number of ranks.

    All ranks work at the same time before they exchange, so they share the cores.
    """
    found = [exchange for one in observed for exchange in exchanges_of(one)]
    share = min(1.0, cores / observed[0].loads.world)
    work = {kind: LinearCost(fixed_s=share * _work(found, kind)) for kind in ("keys", "vectors", "gradients", "dense")}
    pairs = [
        (e.num_bytes, (e.measured_s - work[e.kind].fixed_s / share + e.bytes_s - e.waited_s) / e.bytes_s)
        for e in found
        if e.kind in ("vectors", "gradients") and e.waited_s > _SMALL_S
    ]
    sizes, ratios = np.array(pairs or [(0.0, 1.0)]).T
    return WorldFit(work, Spread.of(sizes, np.maximum(0.3, ratios)))


def _work(found: Sequence[TimedExchange], kind: str) -> float:
    """Return the median time of an exchange without its transfer, over small exchanges, or over all if none is
    small."""
    of_kind = [e for e in found if e.kind == kind]
    small = [e for e in of_kind if e.waited_s < _SMALL_S] or of_kind
    return max(0.0, statistics.median(e.measured_s - e.waited_s for e in small))


def profile_of(plain: Sequence[StageObservations], world: WorldFit) -> Profile:
    """Return a profile with stages fitted to ranks with their own cores, and the local work of exchanges.

    Deduplication and assembly are part of the serial key exchange, and are not separated from it.
    """
    return replace(
        fit_profile(plain, Profile()),
        exchange_keys=world.work["keys"],
        exchange_vectors=world.work["vectors"],
        exchange_gradients=world.work["gradients"],
        dense_reduce=world.work["dense"],
    )


def compute_spread(plain: Sequence[StageObservations], profile: Profile) -> Spread:
    """Return the variation of computation times, which does not depend on the amount."""
    rate = LinearCost(fixed_s=profile.compute.fixed_s, unit_s=profile.compute.flop_s)
    ratios = ratios_of(plain, "train.forward_backward", "linear_flops", rate)
    shuffled = np.random.default_rng(0).permutation(ratios)
    return Spread(np.zeros(len(ratios)), shuffled)


def describe(world: WorldFit) -> dict[str, Any]:
    """Return the fit as values for the result file."""
    work = {f"{kind}_ms": round(rate.fixed_s * 1e3, 3) for kind, rate in world.work.items()}
    low, middle, high = np.percentile(world.spread.ratios, [10, 50, 90])
    return {**work, "byte_time_ratio_p10_p50_p90": [round(float(v), 2) for v in (low, middle, high)]}
