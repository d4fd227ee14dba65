"""What `nestrec plan` and `nestrec train --plan-only` show on a terminal.

What `nestrec report` adds to what a run has recorded: recommendations for a few users of its test.
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
from nestrec.base.cuda import chosen_device
from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.inference.recommender import load
from nestrec.planning.cluster_config import ClusterConfig, load_cluster, this_machine
from nestrec.planning.hardware_profile import Profile
from nestrec.planning.plan import Plan, launch_command, lost_rows, make_plan, plan_rows
from nestrec.planning.plan_constraints import PlanConstraints, check_fits, given_by, largest_of
from nestrec.planning.recipe_workload import workload_of
from nestrec.planning.tier_memory import options_of, placements_of
from nestrec.report import print_rows
from nestrec.report.markup import Markup
from nestrec.report.plan_page import plan_sections
from nestrec.report.result_sections import Sample, samples
from nestrec.tasks.task_registry import store_option
from nestrec.training.run_config import RunConfig
from nestrec.training.run_folder import RunFolder

MOST_LOST = 40


def plan_run(
    cfg: RunConfig, recipe: str, cluster: ClusterConfig, overrides: Mapping[str, str], *, most: int, explains: bool
) -> tuple[Plan, PlanConstraints, list[dict[str, Any]]]:
    """Search, and print the best few; the plan, what was held fixed, and rows. recipe: as it was asked for.
    overrides: what it was changed by."""
    given = given_by(cfg, overrides, workload_of(cfg), cluster, store_option(cfg.task))
    plan = make_plan(given.workload, cluster, given.space)
    largest = largest_of(plan.workload)
    moved = None if largest.keeps_store else largest.name
    found = {o.candidate: placements_of(plan.workload, cluster, o.candidate, o.memory) for o in plan.found.best[:most]}
    options = {**{name: override_text(value) for name, value in given.others.items()}, **overrides}
    launch = {
        candidate: launch_command(recipe, cluster, candidate, moved, {**options, **options_of(placements)})
        for candidate, placements in found.items()
    }
    rows = plan_rows(plan, most=most, launch=launch)
    for row, placements in zip(rows, found.values(), strict=True):
        row["placements"] = {p.table: p.placement for p in placements}
    console = Console()
    for line in given.said():
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if rows:
        title = f"{cfg.name} on {cluster.name}: {cluster.world} ranks, {plan.workload.batch_samples} samples a step"
        best = enumerate(zip(plan.found.best, rows, strict=False), 1)
        print_rows([_short(i, str(o.candidate), row) for i, (o, row) in best], title=title, console=console)
        tiers = [line for i, row in enumerate(rows, 1) for line in _tiers(i, row)]
        print_rows(tiers, title="MB of a rank", console=console)
        print_rows([_links(i, row) for i, row in enumerate(rows, 1)], title="MB sent by a rank a step", console=console)
        of_tables = [{"plan": i, **p.row} for i, placements in enumerate(found.values(), 1) for p in placements]
        print_rows(of_tables, title="tables over ranks, KB that a rank sends a step", console=console)
        for i, row in enumerate(rows, 1):
            console.print(f"{i}: {row['launch']}", soft_wrap=True, highlight=False, markup=False)
        for i, row in enumerate(rows, 1):
            if row["untested"]:
                said = f"{i}: untested by us: {row['untested']} (docs/what-was-run.md)"
                console.print(said, soft_wrap=True, highlight=False, markup=False)
    if explains:
        print_rows(lost_rows(plan, most=MOST_LOST), title="why the others lost", console=console)
    for shortage in plan.shortages:
        console.print(f"nothing fits: {shortage}", soft_wrap=True, highlight=False, markup=False)
    return plan, given, rows


def sections_of_run(run: Path, cluster: str) -> dict[str, Markup | None]:
    """Sections of a run's page: what a cluster would do with as many samples a rank as the run had a step."""
    cfg = RunFolder(run).config()
    machines = load_cluster(cluster)
    workload = workload_of(cfg)
    plan = make_plan(replace(workload, batch_samples=workload.batch_samples * machines.world), machines)
    where = f"on {machines.name}, simulated"
    return {f"{title} {where}": content for title, content in plan_sections(plan).items()}


def open_cluster(name: str, hosts: int | None, profile: Path | None) -> ClusterConfig:
    """A cluster file, with another number of hosts or a measured profile where given."""
    cluster = load_cluster(name)
    if hosts is not None:
        cluster = replace(cluster, hosts=hosts)
    if profile is not None:
        try:
            frame = json_module.loads(profile.read_text())
        except (OSError, ValueError) as error:
            remedy = "name what `nestrec bench calibrate --json` wrote"
            raise UserError(f"cannot be read: {error}", option="--profile", value=str(profile), remedy=remedy) from error
        if "profile" not in frame:
            raise UserError(
                "holds no profile",
                option="--profile",
                value=str(profile),
                remedy="write one with `nestrec bench calibrate --json`",
            )
        cluster = replace(cluster, profile=from_plain(Profile, frame["profile"]))
    return cluster


def check_plan(cfg: RunConfig, cluster: str | None) -> None:
    """Print what a run would need and take, as it is configured; an error where it does not fit."""
    uses_cuda = chosen_device(cfg.training.device) == "cuda"
    machine = this_machine(uses_cuda=uses_cuda) if cluster is None else load_cluster(cluster)
    outcome = check_fits(cfg, workload_of(cfg), machine)
    console = Console()
    console.print(f"fits: {cfg.name} on {machine.name}, {machine.world} ranks", highlight=False)
    for tier, memory in outcome.memory.items():
        console.print(
            f"  {tier}: {memory.needed / 1e6:,.1f} MB of {memory.limit / 1e6:,.1f} MB a rank", highlight=False
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
    """A section for a tested retrieval run; nothing where the model or its data are not at hand."""
    file = run / "eval" / "test.npz"
    try:
        cfg = RunFolder(run).config()
        if cfg.task.kind != "retrieval" or not file.is_file():
            return {}
        dataset = Dataset.open(cfg.data.folder)
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as kept:
            users = kept["users"]
        found = _samples(run, dataset, np.sort(users)[:: max(1, len(users) // NUM_USERS)][:NUM_USERS])
    except (UserError, OSError, ValueError, KeyError):
        return {}  # a report is made of whatever there is: the run may be young, and its data elsewhere
    return {"Sample recommendations": samples(found, _titles(dataset))}


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
    answers = load(run).recommend_all(histories, NUM_RECOMMENDED)
    return [
        Sample(user, list(history["items"])[-NUM_BEFORE:], answer.items, target)  # type: ignore[call-overload]
        for user, history, answer, target in zip(dataset.user_keys(users), histories, answers, targets, strict=True)
    ]


def _titles(dataset: Dataset) -> dict[str, str]:
    """Item key to what people call the item."""
    named = zip(dataset.items().column("item_key").to_pylist(), dataset.item_texts(), strict=False)
    return {key: text for key, text in named if text}
