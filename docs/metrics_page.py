"""Generates the list of Prometheus metrics of a server, of the gateway and of Ray Serve, from their collectors."""

import ast
import inspect
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from markdown_text import code, escaped, page, table
from prometheus_client.core import Metric

from nestrec.serving.fleet import ray_serve
from nestrec.serving.fleet.gateway_metrics import GatewayMetrics
from nestrec.serving.http.server_metrics import Metrics

_SUFFIXES = {"counter": "_total", "info": "_info"}


def metrics_page() -> str:
    """Return the page of all metrics."""
    return page(
        "# Metrics",
        "`GET /metrics` of a server returns its metrics in the Prometheus text format, with the role `monitor` if the "
        "server requires API keys. The gateway returns its own metrics and those of all instances, which have the "
        "label `slot` there. User ids and item ids are never label values. [Operating a server](../operating.md) "
        "describes alerts and dashboards.",
        "Histograms have the usual series `_bucket`, `_sum` and `_count`. The label `model` is the role of the model "
        "in the cascade, `retrieval` or `ranking`. The usual metrics of processes (`process_cpu_seconds_total`, "
        "`process_resident_memory_bytes`, ...) are present on Linux, with the prefix `nestrec_gateway_` for the "
        "gateway.",
        "## Server",
        _metrics_table(server_metrics()),
        "## Gateway",
        _metrics_table(gateway_metrics()),
        "## Ray Serve",
        "Replicas report these through Ray, in addition to the metrics of the server.",
        _table_of(_ray_metrics()),
    )


class _Zeros:
    """Object with the value 0 for every attribute, in place of the counters of a server that has not started."""

    def __getattr__(self, name: str) -> int:
        return 0


def server_metrics() -> list[Metric]:
    """Return the metric families of a server without models."""
    service: Any = SimpleNamespace(deployments={}, router=_Zeros(), reloads=_Zeros(), is_ready=True)
    return _own(Metrics(service)._registry.collect())


def gateway_metrics() -> list[Metric]:
    """Return the metric families of a gateway without instances; those that a server has too are included."""
    router: Any = _Zeros()
    return _own(GatewayMetrics(router)._own.collect())


def _own(families: Iterable[Metric]) -> list[Metric]:
    return sorted((family for family in families if "process" not in family.name), key=lambda family: family.name)


def _metrics_table(families: Iterable[Metric]) -> str:
    return _table_of((f.name, f.type, getattr(f, "_labelnames", ()), f.documentation) for f in families)


def _table_of(metrics: Iterable[tuple[str, str, Iterable[str], str]]) -> str:
    rows = [
        [
            code(f"{name}{_SUFFIXES.get(kind, '')}"),
            kind,
            ", ".join(code(label) for label in labels) or "none",
            escaped(description),
        ]
        for name, kind, labels, description in metrics
    ]
    return table(["metric", "type", "labels", "meaning"], rows)


def _ray_metrics() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    for node in ast.walk(ast.parse(inspect.getsource(ray_serve))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Counter":
            name, description = (ast.literal_eval(argument) for argument in node.args)
            yield name, "counter", (), description
