"""Constraints of a plan that the user has given, and plans of the user's own options.

What of a plan the user has given: it is held as it is, and only the rest is searched.

Whether a run fits as it is configured: asked before anything is allocated.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nestrec.base.config_overrides import override_text
from nestrec.base.errors import UserError
from nestrec.pipeline.argument_checks import check_cut
from nestrec.pipeline.schedule_types import check_can_cut
from nestrec.planning.cluster_config import ClusterConfig
from nestrec.planning.hardware_profile import StoreKind
from nestrec.planning.predictor import Prediction, Predictor
from nestrec.planning.search_space import Candidate, Space, transports_of
from nestrec.planning.shortage_advice import shortages
from nestrec.planning.workload import TableLoad, Workload
from nestrec.training.run_config import RunConfig


def candidate_of(cfg: RunConfig, store: StoreKind = "device") -> Candidate:
    """The run's own choices. Micro-batches that are chosen while training count as one, which needs most memory."""
    parts = cfg.batch.micro_batches if isinstance(cfg.batch.micro_batches, int) else 1
    exchange = cfg.ranks.exchange
    return Candidate(
        schedule=cfg.pipeline.schedule,
        micro_batches=parts,
        store=store,
        policy=cfg.balance.policy,
        window_cache=cfg.pipeline.window_cache,
        replicas=cfg.ranks.replicas,
        transport=exchange if exchange in ("host", "copy_engine") else "collectives",
    )


def largest_of(workload: Workload) -> TableLoad:
    """The table with most to keep."""
    return max(workload.tables, key=lambda table: table.rows * table.row_bytes)


def check_replicas(replicas: int, world: int) -> None:
    """Raise a UserError where ranks cannot form so many groups."""
    if world % replicas:
        remedy = f"choose a divisor of {world}"
        raise UserError("must divide the number of ranks", option="ranks.replicas", value=replicas, remedy=remedy)


def check_micro_batches(micro_batches: int, workload: Workload) -> None:
    """Raise a UserError where a global batch has fewer samples; before so many are rehearsed."""
    check_cut(micro_batches, workload.batch_samples, "a global batch", field="batch.micro_batches")


def check_fits(cfg: RunConfig, workload: Workload, cluster: ClusterConfig) -> Prediction:
    """Predicted figures of the run as configured, or a UserError that says what is short and what would fix it."""
    # Time is reckoned with one store: that of the table with most to keep. Memory is that of each where it is.
    store = largest_of(workload).store
    tables = tuple(replace(table, keeps_store=table.store != store) for table in workload.tables)
    workload = replace(workload, tables=tables)
    predictor = Predictor(workload, cluster)
    candidate = candidate_of(cfg, store)
    check_replicas(candidate.replicas, cluster.world)
    check_micro_batches(candidate.micro_batches, workload)
    found = shortages(predictor, candidate, Space().on(cluster, workload))
    if found:
        short = found[0]
        remedy = " or ".join(short.remedies) or "use larger hosts"
        field = f"memory of the {short.tier} tier, bytes"
        raise UserError(f"the plan does not fit: {short}", option=field, value=round(short.memory.needed), remedy=remedy)
    return predictor.predict(candidate)


SEARCHED = {
    "pipeline.schedule": ("schedules", "schedule"),
    "batch.micro_batches": ("micro_batches", "micro_batches"),
    "ranks.replicas": ("replicas", "replicas"),
    "balance.policy": ("policies", "policy"),
    "pipeline.window_cache": ("window_cache", "window_cache"),
    "ranks.exchange": ("transports", "transport"),
}
"""Options that a plan chooses, to their fields of a space and of a candidate; stores and placements are those of
tables."""
_USUAL = {"pipeline.window_cache": False, "ranks.replicas": 1, "ranks.exchange": "auto"}
"""Options that a candidate names only where it has something else than this."""
_NOT_MODELLED = {
    "ranks.context": 1,
    "ranks.dense": "replicated",
    "ranks.hierarchy": False,
    "pipeline.clustering": None,
    "replica_sync.mode": "gradients",
}
"""Options that change a step, to the value that plans reckon with."""


@dataclass(frozen=True, slots=True)
class PlanConstraints:
    """A plan's limits."""

    space: Space
    """what is left to search"""
    workload: Workload
    """all its tables stay where they are, but the largest one where a plan may choose its store"""
    held: Mapping[str, Any]
    """option to the value that the plan keeps"""
    others: Mapping[str, Any]
    """usual values of options which are open and for which the recipe has others"""
    not_modelled: Mapping[str, Any]
    """option to a value that a run takes and that a plan does not reckon with"""

    def said(self) -> list[str]:
        """For people."""
        lines = {"held as given, not searched": self.held, "not reckoned with by plans": self.not_modelled}
        return [
            f"{what}: {', '.join(f'{name}={override_text(value)}' for name, value in named.items())}"
            for what, named in lines.items()
            if named
        ]


def given_by(
    cfg: RunConfig, overrides: Mapping[str, str], workload: Workload, cluster: ClusterConfig, store_option: str | None
) -> PlanConstraints:
    """overrides: what the recipe was changed by, as typed. store_option: that of the task, for its largest table."""
    candidate = candidate_of(cfg)
    space = Space()
    held = dict[str, Any]()
    for option, (of_space, of_candidate) in SEARCHED.items():
        value = _value(cfg, option)
        if _is_said(option, overrides) and value != "auto":  # which leaves it open, too
            held[option] = value
            space = replace(space, **{of_space: (getattr(candidate, of_candidate),)})
    _check(held, cluster)
    check_micro_batches(candidate.micro_batches, workload)
    if not workload.may_be_cut:
        check_can_cut("batch", candidate.micro_batches)
    for name, options in cfg.tables.items():
        named = {"store": options.store, "placement": None if options.placement == "auto" else options.placement}
        held |= {f"tables.{name}.{option}": value for option, value in named.items() if value is not None}
    largest = largest_of(workload)
    if largest.keeps_store:
        space = replace(space, stores=(largest.store,))
    elif store_option is not None and _is_said(store_option, overrides):
        space = replace(space, stores=(largest.store,))
        held[store_option] = largest.store
    tables = tuple(replace(table, keeps_store=table is not largest or bool(space.stores)) for table in workload.tables)
    workload = replace(workload, tables=tables)
    not_modelled = {option: value for option, usual in _NOT_MODELLED.items() if (value := _value(cfg, option)) != usual}
    open_options = {option: usual for option, usual in _USUAL.items() if option not in held}
    others = {option: usual for option, usual in open_options.items() if _value(cfg, option) != usual}
    return PlanConstraints(space, workload, held, others, not_modelled)


def _check(held: Mapping[str, Any], cluster: ClusterConfig) -> None:
    """Raise a UserError for what this cluster cannot do."""
    check_replicas(held.get("ranks.replicas", 1), cluster.world)
    exchange = held.get("ranks.exchange", "collectives")
    known = transports_of(cluster) if cluster.device.kind == "cuda" else ("collectives", "host", "shared_memory")
    if exchange not in known:
        problem = f"is not to be had on {cluster.name}"
        remedy = f"take {' or '.join(known)}"
        if exchange == "host":
            problem, remedy = f"{problem}, whose file does not say host.copy_gb_per_s", f"say it there, or {remedy}"
        raise UserError(problem, option="ranks.exchange", value=exchange, remedy=remedy)


def _is_said(option: str, overrides: Mapping[str, str]) -> bool:
    """Whether an option was given: by its name, or inside of a part of the config that was given as a whole."""
    return any(_reaches(name, text, option) for name, text in overrides.items())


def _reaches(name: str, text: str, option: str) -> bool:
    if name == option or not option.startswith(f"{name}."):
        return name == option
    try:
        value = json.loads(text)
    except ValueError:
        return False
    for part in option.removeprefix(f"{name}.").split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def _value(cfg: RunConfig, option: str) -> Any:
    value: Any = cfg
    for part in option.split("."):
        value = getattr(value, part)
    return value
