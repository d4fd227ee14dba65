"""Run commands: train, tune, launch, plan, demo, recipes, options, eval."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nestrec.base.config_overrides import PASS_THROUGH, parse_overrides
from nestrec.base.errors import UserError, require
from nestrec.base.files import check_file, check_folder
from nestrec.base.process import gc_frozen_import
from nestrec.cli.former_names import command_remedy

app = typer.Typer()


@app.command(context_settings=PASS_THROUGH)
def train(  # noqa: PLR0917
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="Recipe name (see `nestrec recipes`), or config.json of a run.")],
    output: Annotated[Path | None, typer.Option(help="Run folder; runs/RECIPE by default.")] = None,
    warm_start: Annotated[
        Path | None,
        typer.Option(
            "--warm-start", metavar="RUN_FOLDER", help="Start with the weights, tables and optimizer state of this run."
        ),
    ] = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Only check that the run fits into memory.")] = False,
    cluster: Annotated[str | None, typer.Option(help="Cluster file for --plan-only; this machine by default.")] = None,
) -> None:
    """Train a recipe, then evaluate its best weights on the test split.

    If the run folder has checkpoints, training resumes from the last one.

    - [bold]nestrec train demo --training.epochs 3[/bold]: change any option of a recipe
      by its dotted name; [bold]nestrec options train demo[/bold] lists them.
    - [bold]nestrec train auto --data.folder data/mine --output runs/mine[/bold]: choose
      task, model, sizes, loss, split and learning rates by the statistics of a
      dataset, and print the reasons.
    - [bold]nestrec launch -n 2 train demo[/bold]: train on two ranks of this machine.
      Under torchrun, the same command trains on all ranks.
    """
    with gc_frozen_import():
        from nestrec.api import resolve_config
        from nestrec.cli.training_output import train_run

    cfg = resolve_config(recipe, parse_overrides(context.args, ("output", "warm-start", "cluster", "plan-only")))
    if plan_only:
        from nestrec.cli.plan_output import check_plan

        check_plan(cfg, cluster)
        return
    remedy = "add --plan-only, or see `nestrec plan --help` and docs/many-machines.md"
    require(cluster is None, "can only be used with --plan-only", option="--cluster", value=cluster, remedy=remedy)
    folder = output or Path("runs") / cfg.name
    check_folder(folder, "--output")
    train_run(cfg, folder, warm_start)


@app.command(context_settings=PASS_THROUGH)
def tune(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="Recipe name, `auto`, or config.json of a run.")],
    *,
    output: Annotated[Path, typer.Option(help="Folder of the search; an existing search is resumed.")],
    search: Annotated[
        list[str] | None,
        typer.Option(help="option=low..high or option=a,b,c; repeatable. Default: learning rate, dropout, layers."),
    ] = None,
    num_trials: Annotated[int | None, typer.Option(min=1, help="Stop after this many scored trials.")] = None,
    time_budget_min: Annotated[float | None, typer.Option(min=0.01, help="Stop after this many minutes.")] = None,
    num_ranks: Annotated[int, typer.Option(min=1, help="Number of ranks of each trial, on this machine.")] = 1,
) -> None:
    """Search hyperparameters of a recipe by its best validation score, within a number of trials or minutes.

    - [bold]nestrec tune auto --data.folder data/mine --output runs/tune --num-trials 20
      --search optimizer.learning_rate=1e-4..1e-2
      --search task.encoder.dim=32,64,128 --time-budget-min 60[/bold]

    Other dotted options apply to all trials. If the search is killed, the same
    command resumes it, with the unfinished trial first.
    """
    from nestrec.api import resolve_config
    from nestrec.tuning import measure_by_training, parse_search, shared_settings
    from nestrec.tuning import tune as tune_recipe

    overrides = parse_overrides(context.args, ("output", "search", "num-trials", "time-budget-min", "num-ranks"))
    space = parse_search(search or [])
    first_trial = {option: values.first for option, values in space.items()}
    cfg = resolve_config(recipe, {**overrides, **first_trial})  # reports misspelled options before the first trial
    result = tune_recipe(
        output,
        space,
        measure_by_training(recipe, overrides, num_ranks),
        num_trials=num_trials,
        minutes=time_budget_min,
        shared=shared_settings(recipe, overrides, Path(cfg.data.folder)),
        report=typer.echo,
    )
    options = " ".join(f"--{name} {value}" for name, value in result.overrides.items())
    typer.echo(
        f"best of {result.num_trials} {'trial' if result.num_trials == 1 else 'trials'}: {result.score:.4f}, {options}"
    )
    typer.echo(f"run folder: {result.folder}; to evaluate it on the test split: nestrec eval {result.folder}")


@app.command(context_settings={**PASS_THROUGH, "allow_interspersed_args": False})
def launch(
    context: typer.Context,
    num_ranks: Annotated[int, typer.Option("--num-ranks", "-n", min=1, help="Number of ranks on this machine.")],
) -> None:
    """Run a command or your own script on several ranks of this machine: nestrec launch -n 2 train demo.

    - [bold]nestrec launch -n 2 train demo --output runs/two[/bold]
    - [bold]nestrec launch -n 2 recommend runs/mine --output recs.parquet[/bold]
    - [bold]nestrec launch -n 2 my_script.py --epochs 3[/bold]: arguments after the name of
      the script are passed to it.

    This is a thin wrapper of torchrun that returns the exit code of the ranks
    and prints its meaning: 0 success, 2 invalid input, 70 loss not finite, 75
    interrupted by a signal after saving a checkpoint, 76 rank lost. For several
    machines and restarts, see docs/many-machines.md.
    """
    with gc_frozen_import():
        from nestrec.cli.launch import is_script
        from nestrec.cli.launch import launch as run_ranks

    if not context.args:
        raise UserError(
            "the command to run is missing", option="launch", value="", remedy="write nestrec launch -n 2 train RECIPE"
        )
    if is_script(context.args[0]):
        if not Path(context.args[0]).is_file():
            remedy = "use the path of an existing Python script"
            raise UserError("this script does not exist", option="launch", value=context.args[0], remedy=remedy)
        sys.exit(run_ranks(num_ranks, context.args))
    root: Any = context.find_root().command
    known = root.list_commands(context)
    if context.args[0] not in known:
        raise UserError(
            "neither a nestrec command nor a Python script (NAME.py)",
            option="launch",
            value=context.args[0],
            remedy=command_remedy(context.args[0], known),
        )
    sys.exit(run_ranks(num_ranks, context.args))


@app.command(context_settings=PASS_THROUGH)
def plan(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="Recipe name, or config.json of a run.")],
    cluster: Annotated[str, typer.Option(help="Cluster file, or a built-in cluster: h100-ib400, cpu-hosts.")],
    *,
    hosts: Annotated[int | None, typer.Option(min=1, help="Number of hosts, instead of the file's.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Profile that `nestrec bench calibrate --json` wrote.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Maximum number of plans to print.")] = 3,
    explain: Annotated[bool, typer.Option("--explain", help="Print why the other candidates were rejected.")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write the plans to a result file (JSON).", callback=check_file)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write an HTML page with scaling curves and a timeline.", callback=check_file),
    ] = None,
) -> None:
    """Find the fastest configuration of a recipe for a cluster, by simulation; the cluster is not needed.

    - [bold]nestrec plan demo --cluster h100-ib400 --hosts 4 --batch.batch_size 4096[/bold]:
      change any option of the recipe as in `train`. Options that you set are
      fixed: the plans keep them.

    Simulates schedules, micro-batches, table replicas, stores, sample balancing
    and the window cache, and rejects candidates that exceed the memory.
    """
    from nestrec.api import resolve_config
    from nestrec.cli.plan_output import open_cluster, plan_run
    from nestrec.report import progress_for
    from nestrec.report.result_file import make_frame, save_frame

    own_options = ("cluster", "hosts", "profile", "top", "json", "html")
    overrides = parse_overrides(context.args, own_options)
    cfg = resolve_config(recipe, overrides)
    with progress_for(f"plan {recipe}"):
        machines = open_cluster(cluster, hosts, profile)
        found, limits, rows = plan_run(cfg, recipe, machines, overrides, max_plans=top, explain=explain)
    if json is not None:
        frame = make_frame(bench="plan", command=" ".join(["nestrec", *sys.argv[1:]]), rows=rows)
        plan_fields = {"fixed": dict(limits.fixed), "shortages": [str(shortage) for shortage in found.shortages]}
        save_frame(json, {**frame, **plan_fields})
    if html is not None:
        from nestrec.report.plan_page import write_plan_page

        typer.echo(f"page: {write_plan_page(html, found, notes=limits.describe())}")


@app.command(context_settings=PASS_THROUGH)
def demo(context: typer.Context, output: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/demo")) -> None:
    """Run a demo: train on two ranks, compare with baselines, compare two schedules bitwise, export and serve.

    - [bold]nestrec demo[/bold]
    - [bold]nestrec demo --output runs/wide --task.encoder.dim 64[/bold]: change options of
      the recipe as in `train`.

    Uses synthetic logs without a download and takes at most three minutes on two
    cores. Prints the path of a report at the end.
    """
    with gc_frozen_import():
        from nestrec.cli.demo_command import run_demo

    run_demo(output, parse_overrides(context.args, ("output",)))


@app.command()
def recipes() -> None:
    """List the recipes of `train`.

    - [bold]nestrec recipes[/bold]

    A recipe is a named configuration of a model with its task, data and options.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nestrec.training.recipes import RECIPES

    table = Table(box=None)
    table.add_column("recipe", no_wrap=True)  # a name that is cut cannot be copied
    for head in ("task", "description", "data"):
        table.add_column(head)
    for name, make in RECIPES.items():
        cfg = make()
        description = " ".join((make.__doc__ or "").split()).removesuffix(".")
        table.add_row(name, cfg.task.kind, description, Text(cfg.data.folder or "your own", overflow="fold"))
    table.add_row("auto", "any", "Chosen by the statistics of a dataset, with reasons", "your own")
    Console().print(table)


@app.command("options")
def list_options(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(help="train RECIPE, prepare FORMAT, serve, bench NAME, ...; then a word.")
    ] = None,
) -> None:
    """List the dotted options of a command with values and descriptions: nestrec options train demo learning_rate.

    - [bold]nestrec options train demo[/bold]: list all options of a recipe.
    - [bold]nestrec options train demo learning_rate[/bold]: list the options whose name or
      description contains the word.
    - [bold]nestrec options[/bold]: list the commands that have dotted options.
    """
    from nestrec.cli.options_command import show_commands, show_options

    if command:
        root: Any = context.find_root().command
        show_options(command, root.commands)
    else:
        show_commands()


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder that `nestrec train` wrote.")],
    split: Annotated[str, typer.Option(help="Data split: valid or test.")] = "test",
    last: Annotated[bool, typer.Option("--last", help="Use the last weights instead of the best ones.")] = False,
) -> None:
    """Evaluate a run and its baselines on held-out data; results of the best weights are stored in RUN/eval.

    - [bold]nestrec eval runs/mine[/bold]: evaluate the best weights on the test split.
    - [bold]nestrec eval runs/mine --split valid --last[/bold]: evaluate the last weights on
      the validation split.
    """
    from nestrec.cli.training_output import evaluate_run

    if split not in ("valid", "test"):
        raise UserError("no such data split", option="--split", value=split, remedy="use valid or test")
    evaluate_run(run, "test" if split == "test" else "valid", best=not last)
