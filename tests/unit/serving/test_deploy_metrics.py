"""The dashboard, alerts and autoscaling rules in `deploy` use metrics that servers export, with conventional names."""

import asyncio
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import promql_parser
import pytest
import yaml
from changing_run import ChangingRun
from prometheus_client.parser import text_string_to_metric_families

from nestrec.base.clock import RealClock
from nestrec.distributed import Topology
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.core.slot_router import KeyedHash, Ring, Router
from nestrec.serving.fleet.gateway_metrics import GatewayMetrics
from nestrec.serving.http.http_app import App
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader
from support.tiny_runs import make_datasets

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
EVENTS = {"items": ["1", "2"], "times_ms": [1, 2]}
PROMETHEUS_METRICS = {"up"}
"""Metrics that Prometheus itself generates."""


def publish(run):
    run.change()
    run.publisher.publish(run.session, run.step)
    run.publisher.close()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Metric families of a server that has received each kind of request, and of a gateway with two slots."""
    folder = tmp_path_factory.mktemp("model")
    make_datasets(folder)
    address = folder / "published"
    run = ChangingRun.begin(Topology.single(), folder, str(address), family="hstu", store="static", seed=1)
    publish(run)
    tables = TablesConfig(store="dram", cache_rows=8)
    service = Service.load([address], ServiceConfig(), tables=tables)
    reloader = Reloader(service, "cpu", tables)
    follower = reloader.followers["retrieval"]
    publish(run)
    assert follower.poll()
    (address / "newest.json").write_text("damaged")
    assert not follower.poll()
    app = App(service, LimitsConfig(default_timeout_ms=10_000), reloader=reloader)
    app.set_auth_failures({"unknown": 1})
    app.metrics.security = SimpleNamespace(file_ages_s={"keys": 1.0}, certificate_expiry_s=1e9)

    async def send_requests():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await client.post("/v1/preinfer", json={"user": "u", "history": EVENTS})
            for body in ({"history": EVENTS, "candidates": ["3"]}, {"candidates": 1}):
                await client.post("/v1/rank", json={"user": "u", **body})
            return (await client.get("/metrics")).content

    text = asyncio.run(send_requests())
    service.close()
    keyed = KeyedHash()
    gateway = GatewayMetrics(Router(Ring.make(2, keyed), keyed, RealClock())).exposition({0: text, 1: text})
    return {"server": families_of(text), "gateway": families_of(gateway)}


def families_of(text):
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def samples_of(families):
    """Return the values of each label, by sample name."""
    found = {}
    for family in families.values():
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def selectors(node):
    """Yield (metric, matchers) of each selector of an expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name, node.matchers.matchers
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        inner = getattr(node, name, None)
        if inner is not None and not isinstance(inner, str | int | float):
            yield from selectors(inner)
    for inner in getattr(node, "args", ()) or ():
        yield from selectors(inner)


def expressions():
    dashboard = json.loads((DEPLOY / "grafana" / "nestrec.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"].replace("$__rate_interval", "5m")
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]
    adapter = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())
    for rule in adapter["rules"]["custom"]:
        query = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'job="nestrec"').replace("<<.GroupBy>>", "instance")
        yield f"autoscaling {rule['name']['as']}", query


def test_dashboard_expressions_use_exported_metrics(exported):
    samples = samples_of(exported["server"]) | samples_of(exported["gateway"])
    metrics = set()
    for where, expression in expressions():
        found = list(selectors(promql_parser.parse(expression)))
        assert found, (where, expression)
        for metric, matchers in found:
            assert metric in samples or metric in PROMETHEUS_METRICS, (where, metric)
            for matcher in matchers:
                assert matcher.name in {*samples.get(metric, {}), "job", "instance"}, (where, metric, matcher.name)
            metrics.add(metric)
        # A sum can only be grouped by labels of its metrics; Prometheus adds instance and job.
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            labels = {name for metric, _ in found for name in samples.get(metric, {})} | {"instance", "job"}
            assert {name.strip() for name in grouped.split(",")} <= labels, (where, grouped)
    assert len(metrics) > 20


def test_metrics_are_on_dashboard_or_in_alert(exported):
    names = {name for _, expression in expressions() for name, _ in selectors(promql_parser.parse(expression))}
    shown = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in names}
    not_shown = {
        "nestrec_engine_events",
        "nestrec_engine_router_events",
        "nestrec_model_loaded_timestamp_seconds",
        "nestrec_table_row_lookups",
    }
    ours = {name for families in exported.values() for name in families if name.startswith("nestrec_")}
    ours = {name for name in ours if not name.startswith("nestrec_gateway_process")}
    assert ours - not_shown == shown & ours


def test_metric_names_and_labels_follow_conventions(exported):
    base_units = ("_seconds", "_bytes", "_pages", "_info", "_ratio")
    for families in exported.values():
        for name, family in families.items():
            assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
            assert family.documentation
            if family.type == "counter":
                assert all(sample.name.endswith(("_total", "_created")) for sample in family.samples)
            if family.type == "histogram":
                assert name.endswith("_seconds")
                bounds = {s.labels["le"] for s in family.samples if s.name.endswith("_bucket")}
                assert len(bounds) > 10
                assert "+Inf" in bounds
            if family.type == "gauge" and re.search(r"(_s|_ms|_b|_kb|_mb)$", name):
                raise AssertionError(f"{name} has no unit in full: {base_units}")
            for sample in family.samples:
                assert set(sample.labels) <= {
                    "route",
                    "status",
                    "outcome",
                    "model",
                    "cache_source",
                    "part",
                    "event",
                    "table",
                    "reason",
                    "slot",
                    "tier",
                    "method",
                    "task",
                    "file",
                    "le",
                    "version",
                    "name",
                }, sample


def test_dashboard_is_up_to_date():
    sys.path.insert(0, str(DEPLOY))
    try:
        from make_dashboard import dashboard
    finally:
        sys.path.remove(str(DEPLOY))
    assert json.loads((DEPLOY / "grafana" / "nestrec.json").read_text()) == dashboard()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)


def test_alerts_have_severity_summary_and_description():
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["description"]
