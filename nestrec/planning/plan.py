"""Plans: the best configurations of a recipe on a cluster, and why other candidates were rejected."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nestrec.base.config import to_plain
from nestrec.base.errors import UserError
from nestrec.planning.cluster_config import ClusterConfig
from nestrec.planning.plan_search import EQUAL_TOLERANCE, SearchResult, search
from nestrec.planning.predictor import Prediction, Predictor
from nestrec.planning.search_space import Candidate, Space, describe_untested
from nestrec.planning.shortage_advice import Shortage, shortages
from nestrec.planning.workload import Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of planning a recipe on a cluster."""

    workload: Workload
    cluster: ClusterConfig
    result: SearchResult
    shortages: tuple[Shortage, ...]
    """Memory shortages of the candidate that is closest to fitting, if no candidate fits."""

    @property
    def best(self) -> Prediction | None:
        """Prediction of the best candidate; None if no candidate fits."""
        return self.result.best[0] if self.result.best else None


def make_plan(workload: Workload, cluster: ClusterConfig, space: Space | None = None) -> Plan:
    """Search for the best configuration of a recipe on a cluster.

    Args:
        workload: The recipe, as `measure_workload` measures it.
        cluster: The cluster.
        space: Options to search; None searches all.

    Raises:
        UserError: The global batch has fewer samples than the cluster has ranks.
    """
    if workload.batch_samples < cluster.world:
        remedy = f"set --batch.batch_size to at least {cluster.world}, or use fewer hosts"
        raise UserError(
            "must be at least one sample per rank",
            option="batch.batch_size",
            value=workload.batch_samples,
            remedy=remedy,
        )
    predictor = Predictor(workload, cluster)
    fitted_space = (space or Space()).for_cluster(cluster, workload)
    result = search(predictor, fitted_space)
    short: tuple[Shortage, ...] = ()
    if not result.best:
        short = tuple(shortages(predictor, result.others[0].candidate, fitted_space))
    return Plan(workload, cluster, result, short)


def launch_command(
    recipe: str,
    cluster: ClusterConfig,
    candidate: Candidate,
    table: str | None,
    run_options: Mapping[str, str] | None = None,
) -> str:
    """Return the command that starts a plan, to be run on each host.

    Args:
        recipe: Name of the recipe.
        cluster: The cluster.
        candidate: Configuration to run.
        table: Name of the table whose store the plan has chosen, if any.
        run_options: Further options of the run.
    """
    options = {**(run_options or {}), **candidate.overrides()}
    if table is not None:
        options[f"tables.{table}.store"] = candidate.store
        if candidate.store == "disk":  # only the user knows on which disk of the hosts there is space
            options.setdefault(f"tables.{table}.store_folder", "FOLDER")
    arguments = shlex.join(part for name, value in options.items() for part in (f"--{name}", str(value)))
    nodes = f"--nnodes {cluster.hosts} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if cluster.hosts > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {cluster.host.ranks} -m nestrec train {recipe} {arguments}"


def plan_rows(plan: Plan, *, limit: int, launch: Mapping[Candidate, str] | None = None) -> list[dict[str, Any]]:
    """Return one row per plan, the best first, for tables and result files.

    Args:
        plan: The plan.
        limit: Maximum number of rows.
        launch: Launch commands by candidate, to be included in the rows.
    """
    best = plan.result.best[:limit]
    rows = [_row(outcome, (launch or {}).get(outcome.candidate)) for outcome in best]
    return [
        {**row, "untested": describe_untested(o.candidate, plan.cluster) or ""}
        for row, o in zip(rows, best, strict=True)
    ]


def rejected_rows(plan: Plan, *, limit: int) -> list[dict[str, Any]]:
    """Return one row per rejected candidate with the reason, at most `limit` rows."""
    best = plan.best
    rows = []
    for outcome in (*plan.result.best[1:], *plan.result.others)[:limit]:
        step_ms = round(outcome.step_s * 1e3, 3)
        rows.append({"plan": str(outcome.candidate), "step_ms": step_ms, "why": _why(outcome, best)})
    return rows


def _why(outcome: Prediction, best: Prediction | None) -> str:
    for tier, memory in outcome.memory.items():
        if memory.missing > 0:
            return f"does not fit: the {tier} tier is short by {memory.missing:,.0f} bytes"
    if best is None:
        return ""
    names = {
        "compute": "compute_ns",
        "exposed lookup": "exposed_lookup_ns",
        "exposed communication": "exposed_communication_ns",
        "waiting for other ranks": "idle_ns",
    }
    more = {name: getattr(outcome.parts, f) - getattr(best.parts, f) for name, f in names.items()}
    worst = max(more, key=lambda name: more[name])
    slower = outcome.step_s / best.step_s - 1.0
    if slower < EQUAL_TOLERANCE:
        return "equally fast, but more complex"
    return f"{slower:.1%} slower: {more[worst] * 1e-6:+.3f} ms of {worst}"


def _row(outcome: Prediction, launch: str | None) -> dict[str, Any]:
    parts = outcome.parts
    row: dict[str, Any] = {
        **to_plain(outcome.candidate),
        "step_ms": round(outcome.step_s * 1e3, 3),
        "mfu": round(outcome.mfu, 4),
        "samples_s": round(outcome.samples_s, 1),
        "compute_ms": round(parts.compute_ns * 1e-6, 3),
        "exposed_lookup_ms": round(parts.exposed_lookup_ns * 1e-6, 3),
        "exposed_comm_ms": round(parts.exposed_communication_ns * 1e-6, 3),
        "idle_ms": round(parts.idle_ns * 1e-6, 3),
        "bound_by": outcome.bound_by,
        "memory_bytes": {
            tier: {name: round(value) for name, value in _parts_of(memory).items()}
            for tier, memory in outcome.memory.items()
        },
        "link_bytes": {name: round(value) for name, value in outcome.link_bytes.items()},
    }
    return row if launch is None else {**row, "launch": launch}


def _parts_of(memory: Any) -> dict[str, float]:
    names = ("tables", "state", "buffers", "activations", "dense", "needed", "limit")
    return {name: getattr(memory, name) for name in names}
