"""Server commands: serve, swap, rollback, scale, status, create-key, health."""

import logging
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from nestrec.base import errors
from nestrec.base.config_overrides import PASS_THROUGH, parse_overrides
from nestrec.base.errors import UserError, require
from nestrec.base.lazy import import_extra
from nestrec.base.process import gc_frozen_import

app = typer.Typer()
_LOG = logging.getLogger(__name__)


@app.command(context_settings=PASS_THROUGH)
def serve(
    context: typer.Context,
    model: Annotated[
        list[str],
        typer.Option(help="Folder that `nestrec export` wrote, or address of versions; twice for a cascade."),
    ],
    follow: Annotated[bool, typer.Option("--follow", help="Load newer versions of the address.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow connections from other machines without API keys or TLS.")
    ] = False,
) -> None:
    """Serve exported models over HTTP, by default on this machine only; shuts down gracefully on SIGTERM.

    - [bold]nestrec serve --model models/demo[/bold]: serve /v1/recommend and /v1/rank with
      one retrieval model.
    - [bold]nestrec serve --model models/finds --model models/orders[/bold]: serve a cascade:
      a retrieval model finds items, and a ranking model sorts them.
    - [bold]nestrec serve --model models/demo --port 8080
      --service.engine.prefix_cache.device_bytes 4000000000[/bold]: set dotted options;
      [bold]nestrec options serve[/bold] lists them.
    - [bold]nestrec serve --model models/demo --num_instances 3 --load_balancer
      gateway[/bold]: start several instances on this machine, each with its own KV
      cache, behind a load balancer (gateway or ray).
    - [bold]nestrec serve --model published/demo --follow[/bold]: load new versions when a
      run publishes them.
    """
    from nestrec.base.config_overrides import apply_overrides
    from nestrec.serving.http.signals import SignalHandler

    signals = SignalHandler.installed()  # before the slow imports, so that no signal is lost
    with gc_frozen_import():
        import_extra("nestrec.serving.server", "serve", "required by nestrec serve but not installed")
        from nestrec.serving.http.serve_config import ServeConfig
        from nestrec.serving.server import serve as serve_models
    overrides = parse_overrides(context.args, ("model", "insecure", "follow"))
    overrides |= ({"insecure": "true"} if insecure else {}) | ({"follow.enabled": "true"} if follow else {})
    if "history_store" in overrides:  # --history_store redis://...
        overrides["history_store.url"] = overrides.pop("history_store")
    cfg = apply_overrides(ServeConfig(), overrides)
    print_url = partial(_print_url, is_logged=cfg.log.format == "json")
    try:
        if cfg.load_balancer == "none":
            remedy = "set --load_balancer gateway or ray"
            require(
                cfg.num_instances == 1,
                "several instances need a load balancer",
                option="num_instances",
                value=cfg.num_instances,
                remedy=remedy,
            )
            serve_models(model, cfg, signals, print_url)
        else:
            from nestrec.serving.fleet.fleet_start import serve_fleet

            serve_fleet(model, cfg, overrides, signals, print_url)
    except UserError as error:
        if cfg.log.format != "json":
            raise
        from nestrec.serving.http.server_logging import install_nonblocking_log, wait_for_log

        install_nonblocking_log(cfg.log)  # the server may not have configured its log yet
        _LOG.error("%s", error)
        wait_for_log()
        raise typer.Exit(errors.USER_ERROR) from error


def _print_url(url: str, *, is_logged: bool) -> None:
    if "NESTREC_SLOT" in os.environ:  # an instance: its gateway prints the public URL
        return
    if is_logged:
        _LOG.info("serving on %s", url)
    else:
        typer.echo(f"serving on {url} (live page at /, stop with Ctrl-C)", err=True)


_ADDRESS = Annotated[str, typer.Argument(help="URL of a server or gateway, such as http://127.0.0.1:8000.")]


@app.command()
def swap(
    address: _ADDRESS,
    model: Annotated[
        list[str], typer.Argument(help="Model folders, or addresses of versions (ADDRESS, ADDRESS@VERSION).")
    ],
) -> None:
    """Swap the models of a server, or of all instances of a gateway in a rolling update, after a warm-up.

    - [bold]nestrec swap http://127.0.0.1:8000 models/newer[/bold]
    - [bold]nestrec swap http://127.0.0.1:8000 published/demo@00000012-9f2c41d0[/bold]: pin a
      version; swapping to the address without a version unpins it.

    VERSION is the name of a version, its number (@12), or a unique prefix of
    its digest with at least 4 characters. A relative path that does not exist
    in the current folder is resolved in the folder in which the server was
    started.

    If an instance cannot load the new models, all instances keep the old ones.
    The environment variable NESTREC_ADMIN_KEY contains an API key with the role
    admin.
    """
    from nestrec.cli.fleet_output import absolute_model_paths, call_admin_api, format_instances

    typer.echo("\n".join(format_instances(call_admin_api(address, "swap", {"models": absolute_model_paths(model)}))))


@app.command()
def rollback(address: _ADDRESS) -> None:
    """Roll back a server, or all instances of a gateway, to the models before the last swap.

    - [bold]nestrec rollback http://127.0.0.1:8000[/bold]

    A second rollback undoes the first one. To return to an earlier published
    version, use [bold]nestrec swap SERVER ADDRESS@VERSION[/bold].

    The environment variable NESTREC_ADMIN_KEY contains an API key with the role
    admin.
    """
    from nestrec.cli.fleet_output import call_admin_api, format_instances

    typer.echo("\n".join(format_instances(call_admin_api(address, "rollback", {}))))


@app.command()
def scale(
    address: Annotated[
        str, typer.Argument(help="URL of a gateway, such as http://127.0.0.1:8000; not of a single server.")
    ],
    instances: Annotated[int, typer.Argument(help="New number of instances.")],
) -> None:
    """Scale a fleet: start or stop instances without downtime; other users stay on their instances.

    - [bold]nestrec scale http://127.0.0.1:8000 5[/bold]

    The fleet was started by `nestrec serve --num_instances N --load_balancer
    gateway` (or ray). The environment variable NESTREC_ADMIN_KEY contains an
    API key with the role admin.
    """
    from nestrec.cli.fleet_output import call_admin_api

    count = call_admin_api(address, "scale", {"instances": instances})["instances"]
    typer.echo(f"{count} instance{'' if count == 1 else 's'}")


@app.command("status")
def fleet_status(address: _ADDRESS) -> None:
    """Print the models that a server, or each instance of a gateway, serves.

    - [bold]nestrec status http://127.0.0.1:8000[/bold]

    The environment variable NESTREC_ADMIN_KEY contains an API key with the role
    admin.
    """
    from nestrec.cli.fleet_output import call_admin_api, format_instances

    typer.echo("\n".join(format_instances(call_admin_api(address, "fleet"))))


@app.command("create-key", context_settings=PASS_THROUGH)
def create_key(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the key, shown in logs and used for rate limits.")],
    file: Annotated[
        Path, typer.Option(help="Key file for `nestrec serve --security.api_keys`; created if it is missing.")
    ],
) -> None:
    """Create an API key: print it once, and add its digest to a key file. A running server accepts it immediately.

    - [bold]nestrec create-key shop --file keys.toml --expires_at 2027-01-01T00:00:00Z
      --requests_per_s 200[/bold]
    - [bold]nestrec create-key ann --file keys.toml --role admin[/bold]: set the role: public,
      monitor or admin.

    The server reads the file with `nestrec serve --security.api_keys keys.toml`.
    """
    from nestrec.base.config import to_plain
    from nestrec.base.config_overrides import apply_overrides
    from nestrec.serving.security.auth import ApiKeyEntry, ApiKeyOptions, add_entry, digest_of, generate_key

    api_key = generate_key()
    options = apply_overrides(ApiKeyOptions(), parse_overrides(context.args, ("file",)))
    add_entry(file, ApiKeyEntry(name=name, sha256=digest_of(api_key.encode()).hex(), **to_plain(options)))
    typer.echo(api_key)
    typer.echo(f"API key of {name} with the role {options.role}; {file} contains only its digest", err=True)


@app.command()
def health(
    address: Annotated[str, typer.Argument(help="Host and port of the health checks.")] = "127.0.0.1:8001",
) -> None:
    """Run a liveness probe of a server on this machine, for container health checks; the exit code is 0 if it is alive.

    - [bold]nestrec health 127.0.0.1:8001[/bold]: probe a server that was started with
      `--health_port 8001`.
    """
    from nestrec.cli.fleet_output import check_health

    check_health(address)
