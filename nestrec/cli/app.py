"""The command line: nestrec {demo, prepare, train, plan, eval, export, serve, replay, report, doctor, bench}.

Heavy imports stand inside the commands, so that `nestrec --help` answers at once. Below its first paragraph, help keeps
the lines of a docstring: they fit a terminal of 80 columns. Examples are a list there, and on the page of commands too.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import nestrec
from nestrec.base import exit_codes
from nestrec.base.errors import NonFiniteError, PeerLostError, UserError, did_you_mean
from nestrec.base.leaving import leave
from nestrec.base.memory import ask_for_huge_pages, loading
from nestrec.base.overrides import PASSED_ON, parse_overrides
from nestrec.base.paths import check_file, check_folder
from nestrec.bench.app import app as bench_app
from nestrec.cli.data import app as data_app
from nestrec.cli.help import with_plain_flags
from nestrec.cli.said_once import say_once

app = typer.Typer(
    help="""Train and serve large sequence recommenders.

    Start with [bold]nestrec demo[/bold]: it needs no data and takes a few minutes on two
    cores. Then, with a log of your own:

    - [bold]nestrec prepare log events.csv data/mine --log.user uid --log.item iid
      --log.time ts --log.time_unit iso[/bold]
    - [bold]nestrec train auto --data.folder data/mine --output runs/mine[/bold]
    - [bold]nestrec report runs/mine[/bold]
    - [bold]nestrec export runs/mine models/mine[/bold]
    - [bold]nestrec serve --model models/mine[/bold]

    [bold]nestrec COMMAND --help[/bold] shows examples of each command.
    """,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(bench_app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nestrec {nestrec.__version__}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


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
        from nestrec.cli.training import train_run
        from nestrec.library.configured import configured

    cfg = configured(recipe, parse_overrides(context.args, ("output", "from", "cluster", "plan-only")))
    if plan_only:
        from nestrec.cli.plan import check_plan

        check_plan(cfg, cluster)
        return
    if cluster is not None:
        remedy = "add --plan-only, or see `nestrec plan --help` and docs/many-machines.md"
        raise UserError("only says what --plan-only is to check", field="--cluster", value=cluster, remedy=remedy)
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
    from nestrec.cli.tuning import about_tries, by_training, parse_search
    from nestrec.cli.tuning import tune as tune_recipe
    from nestrec.library.configured import configured

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
    typer.echo(f"best of {found.tries} tries: {found.score:.4f}, {options}")
    typer.echo(f"its run: {found.folder}; nestrec eval {found.folder} measures it on the test part")


@app.command(context_settings={**PASSED_ON, "allow_interspersed_args": False})
def launch(
    context: typer.Context,
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks on this machine.")],
) -> None:
    """Run a command on several ranks of this machine: nestrec launch -n 2 train demo.

    - [bold]nestrec launch -n 2 train demo --output runs/two[/bold]
    - [bold]nestrec launch -n 2 recommend runs/mine --output recs.parquet[/bold]

    A thin wrapper of torchrun. A line says how it ended, and the exit code is
    that of the ranks: 0 done, 2 a mistake of the user, 70 a loss that is not
    finite, 75 saved and stopped by a signal, 76 a rank was lost. Several
    machines and restarts: docs/many-machines.md.
    """
    with loading():
        from nestrec.cli.launch import launch as run_ranks

    if not context.args:
        raise UserError("has nothing to run", field="launch", value="", remedy="write nestrec launch -n 2 train RECIPE")
    known = [
        command.name or (command.callback.__name__ if command.callback else "") for command in app.registered_commands
    ]
    if context.args[0] not in known:
        raise UserError(
            "is no command", field="launch", value=context.args[0], remedy=did_you_mean(context.args[0], known)
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
    from nestrec.bench.harness.frame import make_frame, save_frame
    from nestrec.cli.plan import open_cluster, plan_run
    from nestrec.library.configured import configured
    from nestrec.report import progress_for

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
        from nestrec.cli.demo import run_demo

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

    table = Table("recipe", "task", "what it is", "data", box=None)
    for name, make in RECIPES.items():
        cfg = make()
        what = " ".join((make.__doc__ or "").split()).removesuffix(".")
        table.add_row(name, cfg.task.kind, what, Text(cfg.data.folder or "your own", overflow="fold"))
    table.add_row("auto", "any", "Chosen from the card of a dataset, with reasons", "your own")
    Console().print(table)


@app.command("options")
def list_options(
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
    from nestrec.cli.options import show_commands, show_options

    if command:
        show_options(command)
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
    from nestrec.cli.training import evaluate_run

    if part not in ("valid", "test"):
        raise UserError("is no part of the data", field="--part", value=part, remedy="give valid or test")
    evaluate_run(run, "test" if part == "test" else "valid", best=not last)


app.registered_commands += data_app.registered_commands  # where help and pages list them


@app.command(context_settings=PASSED_ON)
def export(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="A folder that `nestrec train` wrote.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    last: Annotated[bool, typer.Option("--last", help="The last weights instead of the best ones.")] = False,
) -> None:
    """Write a run as a servable folder: safetensors and JSON with digests, nothing executable.

    - [bold]nestrec export runs/mine models/mine[/bold]
    - [bold]nestrec export runs/mine models/mine --defaults.actions click
      --defaults.features.device phone[/bold]: a request must tell what the model
      reads, unless the export names a default. Answers say where one was taken.
    - [bold]nestrec export runs/mine models/small --dtype bfloat16 --tables int8[/bold]:
      weights and tables in fewer bits. What that costs is measured on the run's
      validation part, shown, and kept in the manifest; with [bold]--prefixes fp8[/bold]
      for prefixes of 8 bits.

    [bold]nestrec options export[/bold] lists all options.
    """
    from nestrec.base.config import with_overrides
    from nestrec.report import progress_for
    from nestrec.serving.model.export import ExportConfig, export_run

    cfg = with_overrides(ExportConfig(), parse_overrides(context.args, ("last",)))
    with progress_for(f"export {output}"):
        manifest = export_run(
            run,
            output,
            best=not last,
            defaults=cfg.defaults,
            search=cfg.search,
            dtype=cfg.dtype,
            tables=cfg.tables,
            prefixes=cfg.prefixes,
            device=cfg.device,
        )
    if (cost := manifest.precision) is not None:
        typer.echo(
            f"fewer bits: scores move by {cost.mean_difference:.2g} (at most {cost.largest_difference:.2g}) of"
            f" {cost.mean_score:.2g}, {cost.overlap:.1%} of the ten best stay, {cost.metric} {_told(cost.before)} to"
            f" {_told(cost.after)} ({cost.num_requests} requests)"
        )
    typer.echo(f"model {manifest.version[:12]}: {output} ({sum(f.bytes for f in manifest.files) / 1e6:.1f} MB)")


def _told(metric: float | None) -> str:
    return "not known" if metric is None else f"{metric:.4f}"


@app.command()
def publish(
    run: Annotated[Path, typer.Argument(help="A folder that `nestrec train` wrote.")],
    address: Annotated[str, typer.Argument(help="A folder, or an address that fsspec knows (s3://..., gs://...).")],
    last: Annotated[bool, typer.Option("--last", help="The last weights instead of the best ones.")] = False,
) -> None:
    """Publish a run as the newest version at an address, for servers that follow it (`nestrec serve --follow`).

    - [bold]nestrec publish runs/mine published/mine[/bold]
    - [bold]nestrec train demo --publish.address published/demo
      --publish.every_steps 100[/bold]: a run publishes by itself as it goes on. Then
      each version holds only what has changed since the one before.
    """
    from nestrec.report import progress_for
    from nestrec.serving.versions.publish_run import publish_run

    with progress_for(f"publish {address}"):
        manifest = publish_run(run, address, best=not last)
    size_mb = manifest.num_bytes / 1e6
    typer.echo(f"version {manifest.number} ({manifest.version[:12]}) of step {manifest.step}: {size_mb:.1f} MB")


@app.command(context_settings=PASSED_ON)
def recommend(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A run, an exported model, or an address of published versions.")],
    output: Annotated[Path, typer.Option(help="Parquet file: user, items and scores, best first.")],
    *,
    users: Annotated[str, typer.Option(help="all, a text file of keys, or a Parquet file with histories.")] = "all",
    data: Annotated[Path | None, typer.Option(help="Dataset of the users; of a run its own.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; auto takes a GPU where there is one.")] = "auto",
) -> None:
    """Write the best items of very many users; the same command goes on after a kill.

    - [bold]nestrec recommend runs/mine --k 100 --output recs.parquet[/bold]
    - [bold]nestrec launch -n 2 recommend runs/mine --k 100 --output recs.parquet[/bold]:
      several ranks share the work.

    Equal to /v1/recommend for each user, asked at the moment of the last event.
    A Parquet file of users has the columns user, items (lists of ids) and what
    else the model reads, by the names of requests: times_ms, features.NAME,
    user_features.NAME, context.NAME. [bold]nestrec options recommend[/bold] lists the
    other options.
    """
    from nestrec.cli.batch import recommend_users

    recommend_users(model, users, output, data=data, device=device, words=context.args)


@app.command(context_settings=PASSED_ON)
def embed(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A run, an exported model, or an address of published versions.")],
    output: Annotated[Path, typer.Option(help="Parquet file, or .npy with the keys in a .keys.json beside it.")],
    *,
    what: Annotated[str, typer.Option(help="users or items.")] = "users",
    users: Annotated[str, typer.Option(help="all, a text file of keys, or a Parquet file with histories.")] = "all",
    data: Annotated[Path | None, typer.Option(help="Dataset of the users; of a run its own.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; auto takes a GPU where there is one.")] = "auto",
) -> None:
    """Write vectors of users or items: the product of a user's and an item's is the item's score.

    - [bold]nestrec embed runs/mine --what items --output items.npy[/bold]
    - [bold]nestrec embed models/mine --data data/mine --output users.parquet[/bold]

    The same command goes on after a kill. [bold]nestrec options embed[/bold] lists the other
    options.
    """
    from nestrec.cli.batch import embed_all

    embed_all(model, what, users, output, data=data, device=device, words=context.args)


@app.command(context_settings=PASSED_ON)
def serve(
    context: typer.Context,
    model: Annotated[
        list[str],
        typer.Option(help="A folder that `nestrec export` wrote, or an address of versions; twice for a cascade."),
    ],
    follow: Annotated[bool, typer.Option("--follow", help="Go on to newer versions of the address.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen to other machines without keys or TLS.")] = False,
) -> None:
    """Serve exported models over HTTP, on this machine only unless told otherwise; stops cleanly on SIGTERM.

    - [bold]nestrec serve --model models/demo[/bold]: one retrieval model answers
      /v1/recommend and /v1/rank.
    - [bold]nestrec serve --model models/finds --model models/orders[/bold]: with a
      ranking model beside it, retrieval finds and ranking orders.
    - [bold]nestrec serve --model models/demo --port 8080
      --service.engine.tiers.cache_bytes 4000000000[/bold]: options are dotted fields;
      [bold]nestrec options serve[/bold] lists them.
    - [bold]nestrec serve --model models/demo --instances 3 --front gateway[/bold]:
      several instances on this machine, each with a cache of its own, behind one
      address (gateway, nginx or ray).
    - [bold]nestrec serve --model published/demo --follow[/bold]: versions that a run
      publishes are taken as they come.
    """
    from nestrec.base.config import with_overrides
    from nestrec.serving.api.process.signals import Signals

    signals = Signals.installed()  # before what takes its time: a signal that comes meanwhile is not lost
    try:
        with loading():
            from nestrec.serving.api.server import ServeConfig
            from nestrec.serving.api.server import serve as serve_models
    except ModuleNotFoundError as error:
        remedy = "install it with: pip install 'nestrec[serve]'"
        raise UserError("is needed to serve", field="package", value=error.name, remedy=remedy) from error
    overrides = parse_overrides(context.args, ("model", "insecure", "follow"))
    overrides |= ({"insecure": "true"} if insecure else {}) | ({"follow.on": "true"} if follow else {})
    if "histories" in overrides:  # --histories redis://...
        overrides["histories.url"] = overrides.pop("histories")
    cfg = with_overrides(ServeConfig(), overrides)
    if cfg.front == "none":
        if cfg.instances != 1:
            remedy = "name a front: --front gateway, nginx or ray"
            raise UserError("needs a front", field="instances", value=cfg.instances, remedy=remedy)
        serve_models(model, cfg, signals, _say_where)
    else:
        from nestrec.serving.many.start import serve_many

        serve_many(model, cfg, overrides, signals, _say_where)


def _say_where(url: str) -> None:
    if "NESTREC_SLOT" in os.environ:  # an instance: its front says where it can be reached
        return
    typer.echo(f"serving on {url} (live page at /, stop with Ctrl-C)", err=True)


_ADDRESS = Annotated[str, typer.Argument(help="A server or a front, such as http://127.0.0.1:8000.")]


@app.command()
def swap(
    address: _ADDRESS,
    model: Annotated[
        list[str], typer.Argument(help="Folders of exports, or addresses of versions (ADDRESS, ADDRESS@VERSION).")
    ],
) -> None:
    """Have a server, or every instance of a front, serve other models: warmed up first, one instance after the other.

    - [bold]nestrec swap http://127.0.0.1:8000 models/newer[/bold]
    - [bold]nestrec swap http://127.0.0.1:8000 published/demo@9f2c41[/bold]: a version that
      is named with its address stays until the address is named alone.

    Where one instance does not take them, all keep the old ones. A key for
    administrators is read from NESTREC_ADMIN_KEY.
    """
    from nestrec.cli.fleet import as_seen_by_server, operate, served

    typer.echo("\n".join(served(operate(address, "swap", {"models": as_seen_by_server(model)}))))


@app.command()
def rollback(address: _ADDRESS) -> None:
    """Have a server, or every instance of a front, serve what it served before the last swap.

    - [bold]nestrec rollback http://127.0.0.1:8000[/bold]

    A key for administrators is read from NESTREC_ADMIN_KEY.
    """
    from nestrec.cli.fleet import operate, served

    typer.echo("\n".join(served(operate(address, "rollback", {}))))


@app.command()
def scale(
    address: _ADDRESS,
    instances: Annotated[int, typer.Argument(help="How many are to serve.")],
) -> None:
    """Have a front start or stop instances while users ask; those of the others keep their slots.

    - [bold]nestrec scale http://127.0.0.1:8000 5[/bold]

    The front was started by `nestrec serve --instances N --front gateway` (or
    another front). A key for administrators is read from NESTREC_ADMIN_KEY.
    """
    from nestrec.cli.fleet import operate

    typer.echo(f"{operate(address, 'scale', {'instances': instances})['instances']} instances")


@app.command()
def fleet(address: _ADDRESS) -> None:
    """Tell what a server, or every instance of a front, serves.

    - [bold]nestrec fleet http://127.0.0.1:8000[/bold]

    A key for administrators is read from NESTREC_ADMIN_KEY.
    """
    from nestrec.cli.fleet import operate, served

    typer.echo("\n".join(served(operate(address, "fleet"))))


@app.command(context_settings=PASSED_ON)
def key(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Whose key it is: stands in logs and limits.")],
    file: Annotated[Path, typer.Option(help="File of keys for `nestrec serve --safety.keys`; made where missing.")],
) -> None:
    """Make an API key: printed once, with its digest added to a file of keys. A running server takes it at once.

    - [bold]nestrec key shop --file keys.toml --expires 2027-01-01T00:00:00Z
      --requests_per_s 200[/bold]
    - [bold]nestrec key ann --file keys.toml --role admin[/bold]: public, monitor or admin.

    The server reads the file by `nestrec serve --safety.keys keys.toml`.
    """
    from nestrec.base.config import to_plain, with_overrides
    from nestrec.serving.safety.digests import digest_of, new_key
    from nestrec.serving.safety.keys import KeyEntry, KeyOptions, add_entry

    made = new_key()
    options = with_overrides(KeyOptions(), parse_overrides(context.args, ("file",)))
    add_entry(file, KeyEntry(name=name, sha256=digest_of(made.encode()).hex(), **to_plain(options)))
    typer.echo(made)
    typer.echo(f"a key for {name}, {options.role}; only its digest is kept in {file}", err=True)


@app.command()
def health(
    address: Annotated[str, typer.Argument(help="Where a server answers health checks.")] = "127.0.0.1:8001",
) -> None:
    """Ask a server on this machine whether it lives: exit code 0 where it does. For a container's health check.

    - [bold]nestrec health 127.0.0.1:8001[/bold]: of a server that was started with
      `--health_port 8001`.
    """
    from nestrec.cli.health import check_health

    check_health(address)


@app.command(context_settings=PASSED_ON)
def replay(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="A running server, such as http://127.0.0.1:8000.")],
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write the rows into this result file.", callback=check_file)
    ] = None,
) -> None:
    """Put open-loop load on a server: latency counts from the intended moment, so stalls are not hidden.

    - [bold]nestrec replay http://127.0.0.1:8000 --rate 100 --duration_s 20
      --history 200 --candidates 256[/bold]
    - [bold]nestrec replay http://127.0.0.1:8000 --finds rate --slo_ms 50[/bold]: searches
      for the largest rate.

    Users are made up by default; a recorded load can be given too.
    [bold]nestrec options replay[/bold] lists all options.
    """
    from nestrec.base.config import with_overrides
    from nestrec.bench.harness.frame import write_frame
    from nestrec.report import print_rows, progress_for
    from nestrec.serving.load.replay import ReplayConfig
    from nestrec.serving.load.replay import replay as run_replay

    cfg = with_overrides(ReplayConfig(), parse_overrides(context.args, ("json",)))
    with progress_for(f"replay {url}"):
        rows = run_replay(url, cfg)
    print_rows(rows, title="replay")
    if json is not None:
        write_frame(json, bench="replay", command=" ".join(["nestrec", *sys.argv[1:]]), rows=rows)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A folder that `nestrec train` wrote.")],
    cluster: Annotated[str | None, typer.Option(help="Add what a cluster would make of the run, simulated.")] = None,
) -> None:
    """Write RUN/report.html: one self-contained page with curves, metrics, histograms, config and versions.

    - [bold]nestrec report runs/mine[/bold]
    - [bold]nestrec report runs/mine --cluster h100-ib400[/bold]: also what a cluster would
      make of the run, simulated.
    """
    from nestrec.cli.report import sample_recommendations
    from nestrec.report import progress_for, write_report

    with progress_for(f"report {run}"):
        more = sample_recommendations(run)
        if cluster is not None:
            from nestrec.cli.plan import sections_of_run

            more |= sections_of_run(run, cluster)
        page = write_report(run, more)
    typer.echo(f"report: {page}")


@app.command()
def doctor() -> None:
    """Tell what this machine can do, and what is missing for the rest.

    - [bold]nestrec doctor[/bold]
    """
    from rich.console import Console

    from nestrec.report.doctor import doctor_table, examine

    Console().print(doctor_table(examine()))


def main() -> None:
    """Entry point: a user's mistake ends with a message and no traceback."""
    ask_for_huge_pages()
    try:
        app(standalone_mode=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        leave(ended.code or 0)
    except NonFiniteError as error:
        _fail(error, exit_codes.NON_FINITE)
    except PeerLostError as error:
        _fail(error, exit_codes.PEER_LOST)
    except UserError as error:
        _fail(error, exit_codes.USER_ERROR)


def _fail(error: UserError, code: int) -> NoReturn:
    say_once(f"error: {error}")
    leave(code)


with_plain_flags(app)

if __name__ == "__main__":
    main()
