"""Constraints of a plan: options that the user has set are fixed, and only the others are searched.

`check_fits` predicts whether a run fits into memory with its own options, before anything is allocated.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nestrec.base.config_overrides import override_text
from nestrec.base.errors import UserError
from nestrec.pipeline.argument_checks import check_micro_batches_have_samples
from nestrec.pipeline.schedule_types import check_can_split
from nestrec.planning.cluster_config import ClusterConfig
from nestrec.planning.hardware_profile import StoreKind
from nestrec.planning.predictor import Prediction, Predictor
from nestrec.planning.search_space import Candidate, Space, available_transports
from nestrec.planning.shortage_advice import shortages
from nestrec.planning.workload import TableLoad, Workload
from nestrec.training.run_config import RunConfig


def candidate_from_config(cfg: RunConfig, store: StoreKind = "device") -> Candidate:
    """Return the candidate that corresponds to the options of a run.

    If the number of micro-batches is chosen during training, it counts as 1, which needs the most memory.
    """
    parts = cfg.batch.num_micro_batches if isinstance(cfg.batch.num_micro_batches, int) else 1
    exchange = cfg.parallel.transport
    return Candidate(
        schedule=cfg.pipeline.schedule,
        micro_batches=parts,
        store=store,
        policy=cfg.balance.policy,
        window_cache=cfg.pipeline.window_cache,
        replicas=cfg.parallel.num_replicas,
        transport=exchange if exchange in ("host", "copy_engine") else "collectives",
    )


def largest_table(workload: Workload) -> TableLoad:
    """Return the table with the most bytes."""
    return max(workload.tables, key=lambda table: table.rows * table.row_bytes)


def check_replicas(replicas: int, world: int) -> None:
    """Raise a `UserError` if the number of ranks is not divisible by the number of replica groups."""
    if world % replicas:
        remedy = f"choose a divisor of {world}"
        raise UserError(
            "must divide the number of ranks", option="parallel.num_replicas", value=replicas, remedy=remedy
        )


def check_micro_batches(micro_batches: int, workload: Workload) -> None:
    """Raise a `UserError` if there are more micro-batches than samples; a rehearsal of that many would take long."""
    check_micro_batches_have_samples(
        micro_batches, workload.batch_samples, "a global batch", field="batch.num_micro_batches"
    )


def check_fits(cfg: RunConfig, workload: Workload, cluster: ClusterConfig) -> Prediction:
    """Predict a run with its own options.

    Returns:
        Its predicted step time, memory and traffic.

    Raises:
        UserError: The run does not fit into memory; the error lists which tier is too small and what would help.
    """
    # The cost model has one store, that of the largest table; memory is counted in the own store of each table.
    store = largest_table(workload).store
    tables = tuple(replace(table, keeps_store=table.store != store) for table in workload.tables)
    workload = replace(workload, tables=tables)
    predictor = Predictor(workload, cluster)
    candidate = candidate_from_config(cfg, store)
    check_replicas(candidate.replicas, cluster.world)
    check_micro_batches(candidate.micro_batches, workload)
    results = shortages(predictor, candidate, Space().for_cluster(cluster, workload))
    if results:
        short = results[0]
        remedy = " or ".join(short.remedies) or "use larger hosts"
        field = f"memory of the {short.tier} tier, bytes"
        raise UserError(
            f"the plan does not fit: {short}", option=field, value=round(short.memory.needed), remedy=remedy
        )
    return predictor.predict(candidate)


SEARCHED = {
    "pipeline.schedule": ("schedules", "schedule"),
    "batch.num_micro_batches": ("micro_batches", "micro_batches"),
    "parallel.num_replicas": ("replicas", "replicas"),
    "balance.policy": ("policies", "policy"),
    "pipeline.window_cache": ("window_cache", "window_cache"),
    "parallel.transport": ("transports", "transport"),
}
"""Options that a plan chooses, mapped to their fields of `Space` and `Candidate`. Stores and placements are options of
tables and are handled separately."""
_DEFAULTS = {"pipeline.window_cache": False, "parallel.num_replicas": 1, "parallel.transport": "auto"}
"""Default values of options that a launch command contains only if they differ."""
_NOT_MODELED = {
    "parallel.context_parallel": 1,
    "parallel.dense": "replicated",
    "parallel.hierarchical_all_to_all": False,
    "pipeline.clustering": None,
    "replica_sync.mode": "gradients",
}
"""Options that the simulation does not model, mapped to the value that it assumes."""


@dataclass(frozen=True, slots=True)
class PlanConstraints:
    """Options that a plan must keep, and those that remain to be searched."""

    space: Space
    """Values of the options that are searched."""
    workload: Workload
    """The recipe, with the stores of all tables fixed; the plan can choose only that of the largest table."""
    fixed: Mapping[str, Any]
    """Values that the user has set, by option."""
    reset: Mapping[str, Any]
    """Default values of searched options for which the recipe has another value; the launch command sets them."""
    not_modeled: Mapping[str, Any]
    """Values of options that the run uses and the simulation ignores."""

    def describe(self) -> list[str]:
        """Return lines of text for the output of `nestrec plan`."""
        lines = {"set by the user, not searched": self.fixed, "not modeled by the planner": self.not_modeled}
        return [
            f"{what}: {', '.join(f'{name}={override_text(value)}' for name, value in named.items())}"
            for what, named in lines.items()
            if named
        ]


def constraints_from_options(
    cfg: RunConfig, overrides: Mapping[str, str], workload: Workload, cluster: ClusterConfig, store_option: str | None
) -> PlanConstraints:
    """Determine the constraints of a plan from the options of a run.

    Args:
        cfg: Config of the run.
        overrides: Options that the user has set, as typed.
        workload: The recipe, as `measure_workload` measures it.
        cluster: The cluster.
        store_option: Option of the task for the store of its largest table, if it has one.

    Raises:
        UserError: An option does not fit the cluster or the task.
    """
    candidate = candidate_from_config(cfg)
    space = Space()
    fixed = dict[str, Any]()
    for option, (of_space, of_candidate) in SEARCHED.items():
        value = _value(cfg, option)
        if _is_set(option, overrides) and value != "auto":  # `auto` leaves the option to the search
            fixed[option] = value
            space = replace(space, **{of_space: (getattr(candidate, of_candidate),)})
    _check(fixed, cluster)
    check_micro_batches(candidate.micro_batches, workload)
    if not workload.may_be_cut:
        check_can_split("batch", candidate.micro_batches)
    for name, options in cfg.tables.items():
        named = {"store": options.store, "placement": None if options.placement == "auto" else options.placement}
        fixed |= {f"tables.{name}.{option}": value for option, value in named.items() if value is not None}
    largest = largest_table(workload)
    if largest.keeps_store:
        space = replace(space, stores=(largest.store,))
    elif store_option is not None and _is_set(store_option, overrides):
        space = replace(space, stores=(largest.store,))
        fixed[store_option] = largest.store
    tables = tuple(replace(table, keeps_store=table is not largest or bool(space.stores)) for table in workload.tables)
    workload = replace(workload, tables=tables)
    not_modeled = {
        option: value for option, assumed in _NOT_MODELED.items() if (value := _value(cfg, option)) != assumed
    }
    open_options = {option: default for option, default in _DEFAULTS.items() if option not in fixed}
    reset = {option: default for option, default in open_options.items() if _value(cfg, option) != default}
    return PlanConstraints(space, workload, fixed, reset, not_modeled)


def _check(fixed: Mapping[str, Any], cluster: ClusterConfig) -> None:
    """Raise a `UserError` for an option that this cluster does not support."""
    check_replicas(fixed.get("parallel.num_replicas", 1), cluster.world)
    exchange = fixed.get("parallel.transport", "collectives")
    known = available_transports(cluster) if cluster.device.kind == "cuda" else ("collectives", "host", "shared_memory")
    if exchange not in known:
        problem = f"not available on {cluster.name}"
        remedy = f"use {' or '.join(known)}"
        if exchange == "host":
            problem, remedy = f"{problem}: its file does not set host.host_copy_gb_per_s", f"set it there, or {remedy}"
        raise UserError(problem, option="parallel.transport", value=exchange, remedy=remedy)


def _is_set(option: str, overrides: Mapping[str, str]) -> bool:
    """Return whether the user has set an option, by its name or inside a section that was set as JSON."""
    return any(_sets_option(name, text, option) for name, text in overrides.items())


def _sets_option(name: str, text: str, option: str) -> bool:
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
