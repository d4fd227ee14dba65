"""The commands on runs: train, tune, launch, plan, demo, recipes, options, eval."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nestrec.base.config_overrides import PASSED_ON, parse_overrides
from nestrec.base.errors import UserError, did_you_mean, require
from nestrec.base.files import check_file, check_folder
from nestrec.base.process import loading

app = typer.Typer()


@app.command(context_settings=PASSED_ON)
def train(  # noqa: PLR0917
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `nestrec recipes`), or a config.json of a run.")],
    output: Annotated[Path | None, typer.Option(help="Run folder; runs/RECIPE where not given.")] = None,
    start_from: Annotated[
        Path | None,
        typer.Option("--from", help="Begin with the weights, tables and optimiser state of this run."),
    ] = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Only check that the run fits, and say so.")] = False,
    cluster: Annotated[
        str | None, typer.Option(help="For --plan-only: a cluster file instead of this machine.")
    ] = None,
) -> None:
    """Train a recipe, then measure its best epoch on the test part.

    Started again on the same folder, it goes on from the last checkpoint.

    - [bold]nestrec train demo --training.epochs 3[/bold]: any field of a recipe can be
      changed by its dotted name; [bold]nestrec options train demo[/bold] lists them.
    - [bold]nestrec train auto --data.folder data/mine --output runs/mine[/bold]: reads
      the card of a dataset and chooses task, model, sizes, loss, split and
      rates, with reasons.
    - [bold]nestrec launch -n 2 train demo[/bold]: on two ranks of this machine. Under
      torchrun the same command trains on all ranks.
    """
    with loading():
        from nestrec.api import configured
        from nestrec.cli.training_output import train_run

    cfg = configured(recipe, parse_overrides(context.args, ("output", "from", "cluster", "plan-only")))
    if plan_only:
        from nestrec.cli.plan_output import check_plan

        check_plan(cfg, cluster)
        return
    remedy = "add --plan-only, or see `nestrec plan --help` and docs/many-machines.md"
    require(cluster is None, "only says what --plan-only is to check", option="--cluster", value=cluster, remedy=remedy)
    folder = output or Path("runs") / cfg.name
    check_folder(folder, "--output")
    train_run(cfg, folder, start_from)


@app.command(context_settings=PASSED_ON)
def tune(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A recipe's name, `auto`, or a config.json of a run.")],
    *,
    output: Annotated[Path, typer.Option(help="Folder of the search; started again on it, it goes on.")],
    search: Annotated[
        list[str] | None,
        typer.Option(help="option=low..high or option=a,b,c; repeat it. Rate, dropout and layers where not given."),
    ] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="End when so many tries have a score.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0.01, help="End after so long.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each try, on this machine.")] = 1,
) -> None:
    """Search for better options of a recipe, judged by its best validation, within a number of runs or minutes.

    - [bold]nestrec tune auto --data.folder data/mine --output runs/tune --runs 20
      --search optimizer.learning_rate=1e-4..1e-2
      --search task.encoder.dim=32,64,128 --minutes 60[/bold]

    Other dotted options hold for all tries. Killed and started again, it goes on
    with the try that was under way.
    """
    from nestrec.api import configured
    from nestrec.tuning import about_tries, by_training, parse_search
    from nestrec.tuning import tune as tune_recipe

    given = parse_overrides(context.args, ("output", "search", "runs", "minutes", "ranks"))
    wanted = parse_search(search or [])
    trial = {option: what.first for option, what in wanted.items()}
    chosen = configured(recipe, {**given, **trial})  # a mistyped option is told before anything is trained
    found = tune_recipe(
        output,
        wanted,
        by_training(recipe, given, ranks),
        runs=runs,
        minutes=minutes,
        about=about_tries(recipe, given, Path(chosen.data.folder)),
        said=typer.echo,
    )
    options = " ".join(f"--{name} {value}" for name, value in found.overrides.items())
    typer.echo(f"best of {found.tries} {'try' if found.tries == 1 else 'tries'}: {found.score:.4f}, {options}")
    typer.echo(f"its run: {found.folder}; nestrec eval {found.folder} measures it on the test part")


@app.command(context_settings={**PASSED_ON, "allow_interspersed_args": False})
def launch(
    context: typer.Context,
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks on this machine.")],
) -> None:
    """Run a command, or a script of yours, on several ranks of this machine: nestrec launch -n 2 train demo.

    - [bold]nestrec launch -n 2 train demo --output runs/two[/bold]
    - [bold]nestrec launch -n 2 recommend runs/mine --output recs.parquet[/bold]
    - [bold]nestrec launch -n 2 my_script.py --epochs 3[/bold]: what follows the script's
      name is passed to it.

    A thin wrapper of torchrun. A line says how it ended, and the exit code is
    that of the ranks: 0 done, 2 a mistake of the user, 70 a loss that is not
    finite, 75 saved and stopped by a signal, 76 a rank was lost. Several
    machines and restarts: docs/many-machines.md.
    """
    with loading():
        from nestrec.cli.launch import is_script
        from nestrec.cli.launch import launch as run_ranks

    if not context.args:
        raise UserError("has nothing to run", option="launch", value="", remedy="write nestrec launch -n 2 train RECIPE")
    if is_script(context.args[0]):
        if not Path(context.args[0]).is_file():
            remedy = "give the path of a Python script that exists"
            raise UserError("this script does not exist", option="launch", value=context.args[0], remedy=remedy)
        sys.exit(run_ranks(ranks, context.args))
    root: Any = context.find_root().command
    known = root.list_commands(context)
    if context.args[0] not in known:
        raise UserError(
            "is neither a command nor a Python script (NAME.py)",
            option="launch",
            value=context.args[0],
            remedy=did_you_mean(context.args[0], known),
        )
    sys.exit(run_ranks(ranks, context.args))


@app.command(context_settings=PASSED_ON)
def plan(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or a config.json of a run.")],
    cluster: Annotated[str, typer.Option(help="A cluster file, or one that comes along: h100-ib400, cpu-hosts.")],
    *,
    hosts: Annotated[int | None, typer.Option(min=1, help="Another number of hosts than the file's.")] = None,
    profile: Annotated[Path | None, typer.Option(help="What `nestrec bench calibrate --json` wrote.")] = None,
    most: Annotated[int, typer.Option(min=1, help="How many plans to show.")] = 3,
    explain: Annotated[bool, typer.Option("--explain", help="Say why the others lost.")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write the plans into this result file.", callback=check_file)
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Also write a page with scaling curves and a timeline.", callback=check_file)
    ] = None,
) -> None:
    """Search for the quickest way to run a recipe on a cluster that you may not have yet.

    - [bold]nestrec plan demo --cluster h100-ib400 --hosts 4
      --batch.batch_samples 4096[/bold]: any field of the recipe can be changed as in
      `train`. What is given is not searched: the plan keeps it.

    Tries schedules, micro-batches, replicas of the tables, stores, balance and
    window cache by simulation, within the memory that there is.
    """
    from nestrec.api import configured
    from nestrec.cli.plan_output import open_cluster, plan_run
    from nestrec.report import progress_for
    from nestrec.report.result_file import make_frame, save_frame

    given = ("cluster", "hosts", "profile", "most", "json", "page")
    overrides = parse_overrides(context.args, given)
    cfg = configured(recipe, overrides)
    with progress_for(f"plan {recipe}"):
        machines = open_cluster(cluster, hosts, profile)
        found, limits, rows = plan_run(cfg, recipe, machines, overrides, most=most, explains=explain)
    if json is not None:
        frame = make_frame(bench="plan", command=" ".join(["nestrec", *sys.argv[1:]]), rows=rows)
        of_plan = {"held": dict(limits.held), "shortages": [str(shortage) for shortage in found.shortages]}
        save_frame(json, {**frame, **of_plan})
    if page is not None:
        from nestrec.report.plan_page import write_plan_page

        typer.echo(f"page: {write_plan_page(page, found, said=limits.said())}")


@app.command(context_settings=PASSED_ON)
def demo(context: typer.Context, output: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/demo")) -> None:
    """Train on two ranks beside baselines, show that a fast schedule keeps the bits of the slow one, export and serve.

    - [bold]nestrec demo[/bold]
    - [bold]nestrec demo --output runs/wide --task.encoder.dim 64[/bold]: fields of the
      recipe can be changed as in `train`.

    Synthetic logs, no download, at most three minutes on two cores. Ends with
    the path of a report.
    """
    with loading():
        from nestrec.cli.demo_command import run_demo

    run_demo(output, parse_overrides(context.args, ("output",)))


@app.command()
def recipes() -> None:
    """List the recipes that `train` knows.

    - [bold]nestrec recipes[/bold]

    A recipe is a model with its task, data and options, known by a name.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nestrec.training.recipes import RECIPES

    table = Table(box=None)
    table.add_column("recipe", no_wrap=True)  # a name that is cut cannot be copied
    for head in ("task", "what it is", "data"):
        table.add_column(head)
    for name, make in RECIPES.items():
        cfg = make()
        what = " ".join((make.__doc__ or "").split()).removesuffix(".")
        table.add_row(name, cfg.task.kind, what, Text(cfg.data.folder or "your own", overflow="fold"))
    table.add_row("auto", "any", "Chosen from the card of a dataset, with reasons", "your own")
    Console().print(table)


@app.command("options")
def list_options(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(help="train RECIPE, prepare FORMAT, serve, bench NAME, ...; then a word.")
    ] = None,
) -> None:
    """List a command's dotted options with their values and meaning: nestrec options train demo learning_rate.

    - [bold]nestrec options train demo[/bold]: all options of a recipe.
    - [bold]nestrec options train demo learning_rate[/bold]: those whose name or meaning
      holds the word.
    - [bold]nestrec options[/bold]: the commands that have such options.
    """
    from nestrec.cli.options_command import show_commands, show_options

    if command:
        root: Any = context.find_root().command
        show_options(command, root.list_commands(context))
    else:
        show_commands()


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="A folder that `nestrec train` wrote.")],
    part: Annotated[str, typer.Option(help="valid or test.")] = "test",
    last: Annotated[bool, typer.Option("--last", help="The last weights instead of the best ones.")] = False,
) -> None:
    """Measure a trained run on held-out data, beside its baselines. RUN/eval keeps the result of the best weights.

    - [bold]nestrec eval runs/mine[/bold]: the test part, with the weights of the best
      epoch.
    - [bold]nestrec eval runs/mine --part valid --last[/bold]: the validation part, with
      the last weights.
    """
    from nestrec.cli.training_output import evaluate_run

    if part not in ("valid", "test"):
        raise UserError("is no part of the data", option="--part", value=part, remedy="give valid or test")
    evaluate_run(run, "test" if part == "test" else "valid", best=not last)
