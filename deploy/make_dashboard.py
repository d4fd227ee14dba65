"""Writes grafana/nestrec.json: python deploy/make_dashboard.py. A panel is a line or a few here."""

import json
from pathlib import Path
from typing import Any

_OF = '{job="nestrec"}'
_BY_ROUTE = 'sum by (route) (rate(nestrec_requests_total{status=~"2.."}[$__rate_interval]))'
_QUANTILE = "histogram_quantile({q}, sum by (le, {by}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))"
_NOT_ANSWERED = 'sum by (outcome) (rate(nestrec_request_duration_seconds_count{outcome!="answered"}[$__rate_interval]))'
_SHARE = "sum by (model) (nestrec_{cache}_cache_used_{unit}) / sum by (model) (nestrec_{cache}_cache_{unit} > 0)"
ANSWERED = 'outcome="answered"'
PANELS: list[tuple[str, str, dict[str, str]]] = [
    ("Answers a second", "reqps", {"{{route}}": _BY_ROUTE}),
    (
        "Refused, rejected and failed a second",
        "reqps",
        {"{{outcome}}": _NOT_ANSWERED},
    ),
    (
        "Time to answer",
        "s",
        {
            f"p{q} {{{{route}}}}": _QUANTILE.format(
                q=q / 100, by="route", metric="nestrec_request_duration_seconds", where=ANSWERED
            )
            for q in (50, 99)
        },
    ),
    (
        "Queue and computation, P99",
        "s",
        {
            "queue {{model}}": _QUANTILE.format(q=0.99, by="model", metric="nestrec_queue_duration_seconds", where=""),
            "compute {{model}}": _QUANTILE.format(
                q=0.99, by="model", metric="nestrec_compute_duration_seconds", where=""
            ),
            "way {{model}}, P90": "max by (model) (nestrec_way_seconds)",
            "host {{model}}, of a batch": "max by (model) (nestrec_batch_host_seconds)",
        },
    ),
    (
        "Rankings by place of the prefix",
        "reqps",
        {"{{prefix}}": "sum by (prefix) (rate(nestrec_rankings_total[$__rate_interval]))"},
    ),
    ("Pre-infer signals", "reqps", {"{{outcome}}": "sum by (outcome) (rate(nestrec_signals_total[$__rate_interval]))"}),
    ("Work that waits", "s", {"{{instance}} {{model}}": "sum by (instance, model) (nestrec_queued_seconds)"}),
    (
        "Device at work",
        "percentunit",
        {"{{instance}}": "sum by (instance) (rate(nestrec_device_busy_seconds_total[$__rate_interval]))"},
    ),
    (
        "Prefix caches",
        "percentunit",
        {
            "device {{model}}": _SHARE.format(cache="device", unit="pages"),
            "DRAM {{model}}": _SHARE.format(cache="dram", unit="bytes"),
        },
    ),
    ("Memory of the process", "bytes", {"{{instance}}": "process_resident_memory_bytes" + _OF}),
    ("Versions in service", "short", {"{{model}} {{version}}": "count by (model, version) (nestrec_model_info)"}),
    ("Age of the model", "s", {"{{model}}": "time() - min by (model) (nestrec_model_exported_timestamp_seconds)"}),
    (
        "From an event to an answer",
        "s",
        {
            "p50 {{model}}": _QUANTILE.format(q=0.5, by="model", metric="nestrec_freshness_seconds", where=""),
            "p99 {{model}}": _QUANTILE.format(q=0.99, by="model", metric="nestrec_freshness_seconds", where=""),
            "{{part}} {{model}}": "max by (model, part) (nestrec_freshness_part_seconds)",
        },
    ),
    (
        "Versions of followed models",
        "short",
        {
            "number {{instance}} {{model}}": "max by (instance, model) (nestrec_version_number)",
            "behind {{instance}} {{model}}": "max by (instance, model) (nestrec_versions_behind)",
            "{{event}} a minute": "60 * sum by (event) (rate(nestrec_versions_total[$__rate_interval]))",
        },
    ),
    (
        "Keys not let in",
        "reqps",
        {"{{reason}}": "sum by (reason) (rate(nestrec_refused_credentials_total[$__rate_interval]))"},
    ),
    (
        "Rows of tables not on the device",
        "ops",
        {"{{table}}": 'sum by (table) (rate(nestrec_table_rows_total{event="missed"}[$__rate_interval]))'},
    ),
    (
        "Slots of the front",
        "short",
        {"alive": "sum(nestrec_slot_alive)", "requests {{slot}}": "sum by (slot) (nestrec_slot_requests)"},
    ),
    (
        "Off a user's own slot",
        "reqps",
        {"{{event}}": "sum by (event) (rate(nestrec_front_events_total[$__rate_interval]))"},
    ),
]


def dashboard() -> dict[str, Any]:
    """The whole of it, as Grafana imports it."""
    source = {"type": "prometheus", "uid": "prometheus"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
            "targets": [
                {"refId": chr(65 + i), "datasource": source, "legendFormat": legend, "expr": expr}
                for i, (legend, expr) in enumerate(queries.items())
            ],
        }
        for number, (title, unit, queries) in enumerate(PANELS)
    ]
    return {
        "uid": "nestrec",
        "title": "nestrec serving",
        "tags": ["nestrec"],
        "schemaVersion": 41,
        "version": 1,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "panels": panels,
        "templating": {"list": []},
        "annotations": {"list": []},
        "editable": True,
    }


if __name__ == "__main__":
    path = Path(__file__).parent / "grafana" / "nestrec.json"
    path.write_text(json.dumps(dashboard(), indent=1) + "\n")
