"""Console output of `nestrec plan` and `nestrec train --plan-only`, and extra sections of `nestrec report`.

The extra sections are simulations of a run on a cluster, and recommendations for a few users of its test split.
"""

import itertools
import json as json_module
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from nestrec.base.config_overrides import override_text
from nestrec.base.config_values import from_plain
from nestrec.base.cuda import resolve_device
from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.inference.recommender import load
from nestrec.planning.cluster_config import ClusterConfig, load_cluster, this_machine
from nestrec.planning.hardware_profile import Profile
from nestrec.planning.plan import Plan, launch_command, make_plan, plan_rows, rejected_rows
from nestrec.planning.plan_constraints import PlanConstraints, check_fits, constraints_from_options, largest_table
from nestrec.planning.recipe_workload import measure_workload
from nestrec.planning.tier_memory import choose_placements, placement_options
from nestrec.report import print_rows
from nestrec.report.markup import Markup
from nestrec.report.plan_page import plan_sections
from nestrec.report.result_sections import Sample, samples
from nestrec.tasks.task_registry import store_option
from nestrec.training.run_config import RunConfig
from nestrec.training.run_folder import RunFolder

MAX_REJECTED = 40


def plan_run(
    cfg: RunConfig, recipe: str, cluster: ClusterConfig, overrides: Mapping[str, str], *, max_plans: int, explain: bool
) -> tuple[Plan, PlanConstraints, list[dict[str, Any]]]:
    """Search for the best plans of a run, and print them.

    Args:
        cfg: Config of the run.
        recipe: Recipe as it was typed, for the launch commands.
        cluster: Cluster to plan for.
        overrides: Dotted options that the user set; the plans keep them.
        max_plans: Maximum number of plans to print.
        explain: Print why the other candidates were rejected.

    Returns:
        The plan, the options that were fixed, and one row per printed plan.
    """
    constraints = constraints_from_options(cfg, overrides, measure_workload(cfg), cluster, store_option(cfg.task))
    plan = make_plan(constraints.workload, cluster, constraints.space)
    largest = largest_table(plan.workload)
    moved_table = None if largest.keeps_store else largest.name
    placements_by_candidate = {
        o.candidate: choose_placements(plan.workload, cluster, o.candidate, o.memory)
        for o in plan.result.best[:max_plans]
    }
    options = {**{name: override_text(value) for name, value in constraints.reset.items()}, **overrides}
    launch = {
        candidate: launch_command(recipe, cluster, candidate, moved_table, {**options, **placement_options(placements)})
        for candidate, placements in placements_by_candidate.items()
    }
    rows = plan_rows(plan, limit=max_plans, launch=launch)
    for row, placements in zip(rows, placements_by_candidate.values(), strict=True):
        row["placements"] = {p.table: p.placement for p in placements}
    console = Console()
    for line in constraints.describe():
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if rows:
        title = f"{cfg.name} on {cluster.name}: {cluster.world} ranks, {plan.workload.batch_samples} samples per step"
        best = enumerate(zip(plan.result.best, rows, strict=False), 1)
        print_rows([_short(i, str(o.candidate), row) for i, (o, row) in best], title=title, console=console)
        tiers = [line for i, row in enumerate(rows, 1) for line in _tiers(i, row)]
        print_rows(tiers, title="MB per rank", console=console)
        print_rows(
            [_links(i, row) for i, row in enumerate(rows, 1)], title="MB sent per rank and step", console=console
        )
        table_rows = [
            {"plan": i, **p.row} for i, placements in enumerate(placements_by_candidate.values(), 1) for p in placements
        ]
        print_rows(table_rows, title="placement of tables, KB sent per rank and step", console=console)
        for i, row in enumerate(rows, 1):
            console.print(f"{i}: {row['launch']}", soft_wrap=True, highlight=False, markup=False)
        for i, row in enumerate(rows, 1):
            if row["untested"]:
                note = f"{i}: not tested by the authors: {row['untested']} (docs/what-was-run.md)"
                console.print(note, soft_wrap=True, highlight=False, markup=False)
    if explain:
        print_rows(rejected_rows(plan, limit=MAX_REJECTED), title="rejected candidates", console=console)
    for shortage in plan.shortages:
        console.print(f"does not fit: {shortage}", soft_wrap=True, highlight=False, markup=False)
    return plan, constraints, rows


def sections_of_run(run: Path, cluster: str) -> dict[str, Markup | None]:
    """Return sections of a run's report that simulate the run on a cluster, with its batch size on each rank."""
    cfg = RunFolder(run).config()
    machines = load_cluster(cluster)
    workload = measure_workload(cfg)
    plan = make_plan(replace(workload, batch_samples=workload.batch_samples * machines.world), machines)
    where = f"on {machines.name}, simulated"
    return {f"{title} {where}": content for title, content in plan_sections(plan).items()}


def open_cluster(name: str, hosts: int | None, profile: Path | None) -> ClusterConfig:
    """Load a cluster file; `hosts` replaces its number of hosts, and `profile` adds a measured hardware profile."""
    cluster = load_cluster(name)
    if hosts is not None:
        cluster = replace(cluster, hosts=hosts)
    if profile is not None:
        try:
            frame = json_module.loads(profile.read_text())
        except (OSError, ValueError) as error:
            remedy = "use a file that `nestrec bench calibrate --json` wrote"
            raise UserError(
                f"cannot be read: {error}", option="--profile", value=str(profile), remedy=remedy
            ) from error
        if "profile" not in frame:
            raise UserError(
                "the file does not contain a profile",
                option="--profile",
                value=str(profile),
                remedy="write one with `nestrec bench calibrate --json`",
            )
        cluster = replace(cluster, profile=from_plain(Profile, frame["profile"]))
    return cluster


def check_plan(cfg: RunConfig, cluster: str | None) -> None:
    """Print the memory and predicted step time of a run; raise a `UserError` if it does not fit."""
    uses_cuda = resolve_device(cfg.training.device) == "cuda"
    machine = this_machine(uses_cuda=uses_cuda) if cluster is None else load_cluster(cluster)
    outcome = check_fits(cfg, measure_workload(cfg), machine)
    console = Console()
    ranks = f"{machine.world} rank{'s' if machine.world != 1 else ''}"
    console.print(f"fits: {cfg.name} on {machine.name}, {ranks}", highlight=False)
    for tier, memory in outcome.memory.items():
        console.print(
            f"  {tier}: {memory.needed / 1e6:,.1f} MB of {memory.limit / 1e6:,.1f} MB per rank", highlight=False
        )
    console.print(f"  predicted step: {outcome.step_s * 1e3:.1f} ms, bound by {outcome.bound_by}", highlight=False)


def _short(number: int, plan: str, row: Mapping[str, Any]) -> dict[str, Any]:
    times = {
        "step ms": "step_ms",
        "compute": "compute_ms",
        "lookup": "exposed_lookup_ms",
        "comm": "exposed_comm_ms",
        "idle": "idle_ms",
        "mfu": "mfu",
        "bound by": "bound_by",
    }
    return {"": number, "plan": plan, **{head: row[name] for head, name in times.items()}}


def _tiers(number: int, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = ("needed", "limit", "tables", "state", "buffers", "activations", "dense")
    return [
        {"plan": number, "tier": tier, **{name: round(parts[name] / 1e6, 2) for name in names}}
        for tier, parts in row["memory_bytes"].items()
    ]


def _links(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    return {"plan": number, **{name: round(value / 1e6, 3) for name, value in row["link_bytes"].items()}}


NUM_USERS, NUM_BEFORE, NUM_RECOMMENDED = 4, 4, 5


def sample_recommendations(run: Path) -> dict[str, Markup | None]:
    """Return a section with sample recommendations of a retrieval run; empty if its model or data are unavailable."""
    file = run / "eval" / "test.npz"
    try:
        cfg = RunFolder(run).config()
        if cfg.task.kind != "retrieval" or not file.is_file():
            return {}
        dataset = Dataset.open(cfg.data.folder)
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            users = arrays["users"]
        user_samples = _samples(run, dataset, np.sort(users)[:: max(1, len(users) // NUM_USERS)][:NUM_USERS])
    except (UserError, OSError, ValueError, KeyError):
        return {}  # the rest of the report is still useful: the run may be unfinished, or its data on another machine
    return {"Sample recommendations": samples(user_samples, _titles(dataset))}


def _samples(run: Path, dataset: Dataset, users: "np.typing.NDArray[np.int64]") -> list[Sample]:
    rows = dataset.rows(users)
    keys = ["", *dataset.items().column("item_key").to_pylist()]
    items, offsets = rows.lists["item_ids"]
    times = rows.lists["timestamps_ms"][0] if dataset.card.has_timestamps else None
    histories, targets = [], []
    for start, end in itertools.pairwise(offsets.tolist()):
        history: dict[str, object] = {"items": [keys[i] for i in items[start : end - 1]]}
        if times is not None:
            history |= {"times_ms": times[start : end - 1].tolist(), "now_ms": int(times[end - 1])}
        histories.append(history)
        targets.append(keys[items[end - 1]])
    recommended = load(run).recommend_batch(histories, NUM_RECOMMENDED)
    return [
        Sample(user, list(history["items"])[-NUM_BEFORE:], ranked.items, target)  # type: ignore[call-overload]
        for user, history, ranked, target in zip(dataset.user_keys(users), histories, recommended, targets, strict=True)
    ]


def _titles(dataset: Dataset) -> dict[str, str]:
    """Return the display texts of items by item key."""
    texts = zip(dataset.items().column("item_key").to_pylist(), dataset.item_texts(), strict=False)
    return {key: text for key, text in texts if text}
