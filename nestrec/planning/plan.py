"""A plan: the best few ways to run a recipe on a cluster, and why the others lost."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nestrec.base.config import to_plain
from nestrec.base.errors import UserError
from nestrec.planning.cluster_config import ClusterConfig
from nestrec.planning.plan_search import AS_GOOD, SearchResult, search
from nestrec.planning.predictor import Prediction, Predictor
from nestrec.planning.search_space import Candidate, Space, untested
from nestrec.planning.shortage_advice import Shortage, shortages
from nestrec.planning.workload import Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """What the search found."""

    workload: Workload
    cluster: ClusterConfig
    found: SearchResult
    shortages: tuple[Shortage, ...]
    """of the candidate that lacks least, where none fits"""

    @property
    def best(self) -> Prediction | None:
        return self.found.best[0] if self.found.best else None


def make_plan(workload: Workload, cluster: ClusterConfig, space: Space | None = None) -> Plan:
    """Search what makes sense on this cluster."""
    if workload.batch_samples < cluster.world:
        remedy = f"give --batch.batch_samples at least {cluster.world}, or take fewer hosts"
        raise UserError(
            "is less than a sample a rank", option="batch.batch_samples", value=workload.batch_samples, remedy=remedy
        )
    predictor = Predictor(workload, cluster)
    fitted_space = (space or Space()).on(cluster, workload)
    found = search(predictor, fitted_space)
    short: tuple[Shortage, ...] = ()
    if not found.best:
        short = tuple(shortages(predictor, found.others[0].candidate, fitted_space))
    return Plan(workload, cluster, found, short)


def launch_command(
    recipe: str,
    cluster: ClusterConfig,
    candidate: Candidate,
    table: str | None,
    given: Mapping[str, str] | None = None,
) -> str:
    """How to start it on each host. table: whose store was chosen, if any was. given: other options of the run."""
    options = {**(given or {}), **candidate.overrides()}
    if table is not None:
        options[f"tables.{table}.store"] = candidate.store
        if candidate.store == "disk":  # which folder of the hosts it may fill is not for us to say
            options.setdefault(f"tables.{table}.folder", "FOLDER")
    chosen = shlex.join(part for name, value in options.items() for part in (f"--{name}", str(value)))
    nodes = f"--nnodes {cluster.hosts} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if cluster.hosts > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {cluster.host.ranks} -m nestrec train {recipe} {chosen}"


def plan_rows(plan: Plan, *, most: int, launch: Mapping[Candidate, str] | None = None) -> list[dict[str, Any]]:
    """The best few, for a table and a result file."""
    best = plan.found.best[:most]
    rows = [_row(outcome, (launch or {}).get(outcome.candidate)) for outcome in best]
    return [{**row, "untested": untested(o.candidate, plan.cluster) or ""} for row, o in zip(rows, best, strict=True)]


def lost_rows(plan: Plan, *, most: int) -> list[dict[str, Any]]:
    """Why each of the others lost."""
    best = plan.best
    rows = []
    for outcome in (*plan.found.best[1:], *plan.found.others)[:most]:
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
    if slower < AS_GOOD:
        return "as quick, and not as simple"
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
