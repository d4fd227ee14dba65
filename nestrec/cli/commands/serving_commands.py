"""The commands on servers: serve, swap, rollback, scale, fleet, key, health, replay."""

import logging
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from nestrec.base import errors
from nestrec.base.config_overrides import PASSED_ON, parse_overrides
from nestrec.base.errors import UserError, require
from nestrec.base.lazy import import_extra
from nestrec.base.process import loading

app = typer.Typer()
_LOG = logging.getLogger(__name__)


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
      address (gateway or ray).
    - [bold]nestrec serve --model published/demo --follow[/bold]: versions that a run
      publishes are taken as they come.
    """
    from nestrec.base.config_overrides import with_overrides
    from nestrec.serving.http.signals import SignalHandler

    signals = SignalHandler.installed()  # before what takes its time: a signal that comes meanwhile is not lost
    with loading():
        import_extra("nestrec.serving.server", "serve", "is needed to serve")
        from nestrec.serving.http.serve_config import ServeConfig
        from nestrec.serving.server import serve as serve_models
    overrides = parse_overrides(context.args, ("model", "insecure", "follow"))
    overrides |= ({"insecure": "true"} if insecure else {}) | ({"follow.on": "true"} if follow else {})
    if "histories" in overrides:  # --histories redis://...
        overrides["histories.url"] = overrides.pop("histories")
    cfg = with_overrides(ServeConfig(), overrides)
    say_where = partial(_say_where, is_logged=cfg.log.format == "json")
    try:
        if cfg.front == "none":
            remedy = "name a front: --front gateway or ray"
            require(cfg.instances == 1, "needs a front", option="instances", value=cfg.instances, remedy=remedy)
            serve_models(model, cfg, signals, say_where)
        else:
            from nestrec.serving.fleet.fleet_start import serve_many

            serve_many(model, cfg, overrides, signals, say_where)
    except UserError as error:
        if cfg.log.format != "json":
            raise
        from nestrec.serving.http.server_logging import log_without_waiting, wait_for_log

        log_without_waiting(cfg.log)  # the error may have come before the server set up its log
        _LOG.error("%s", error)
        wait_for_log()
        raise typer.Exit(errors.USER_ERROR) from error


def _say_where(url: str, *, is_logged: bool) -> None:
    if "NESTREC_SLOT" in os.environ:  # an instance: its front says where it can be reached
        return
    if is_logged:
        _LOG.info("serving on %s", url)
    else:
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
    - [bold]nestrec swap http://127.0.0.1:8000 published/demo@00000012-9f2c41d0[/bold]:
      a version that is named with its address stays until the address is named
      alone. The beginning of its name is enough.

    Where one instance does not take them, all keep the old ones. A key for
    administrators is read from NESTREC_ADMIN_KEY.
    """
    from nestrec.cli.fleet_output import as_seen_by_server, operate, served

    typer.echo("\n".join(served(operate(address, "swap", {"models": as_seen_by_server(model)}))))


@app.command()
def rollback(address: _ADDRESS) -> None:
    """Have a server, or every instance of a front, serve what it served before the last swap.

    - [bold]nestrec rollback http://127.0.0.1:8000[/bold]

    A key for administrators is read from NESTREC_ADMIN_KEY.
    """
    from nestrec.cli.fleet_output import operate, served

    typer.echo("\n".join(served(operate(address, "rollback", {}))))


@app.command()
def scale(
    address: Annotated[
        str, typer.Argument(help="A front of several instances, such as http://127.0.0.1:8000; not a single server.")
    ],
    instances: Annotated[int, typer.Argument(help="How many are to serve.")],
) -> None:
    """Have a front start or stop instances while users ask; those of the others keep their slots.

    - [bold]nestrec scale http://127.0.0.1:8000 5[/bold]

    The front was started by `nestrec serve --instances N --front gateway` (or
    another front). A key for administrators is read from NESTREC_ADMIN_KEY.
    """
    from nestrec.cli.fleet_output import operate

    count = operate(address, "scale", {"instances": instances})["instances"]
    typer.echo(f"{count} instance{'' if count == 1 else 's'}")


@app.command()
def fleet(address: _ADDRESS) -> None:
    """Tell what a server, or every instance of a front, serves.

    - [bold]nestrec fleet http://127.0.0.1:8000[/bold]

    A key for administrators is read from NESTREC_ADMIN_KEY.
    """
    from nestrec.cli.fleet_output import operate, served

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
    from nestrec.base.config import to_plain
    from nestrec.base.config_overrides import with_overrides
    from nestrec.serving.security.auth import ApiKeyEntry, ApiKeyOptions, add_entry, digest_of, new_key

    made = new_key()
    options = with_overrides(ApiKeyOptions(), parse_overrides(context.args, ("file",)))
    add_entry(file, ApiKeyEntry(name=name, sha256=digest_of(made.encode()).hex(), **to_plain(options)))
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
    from nestrec.cli.fleet_output import check_health

    check_health(address)
