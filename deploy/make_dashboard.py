"""Writes the Grafana dashboard grafana/nestrec.json: python deploy/make_dashboard.py"""

import json
from pathlib import Path
from typing import Any

_OF = '{job="nestrec"}'
_BY_ROUTE = 'sum by (route) (rate(nestrec_http_requests_total{status=~"2.."}[$__rate_interval]))'
_QUANTILE = "histogram_quantile({q}, sum by (le, {by}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))"
_NOT_SUCCESSFUL = (
    'sum by (outcome) (rate(nestrec_http_request_duration_seconds_count{outcome!="ok"}[$__rate_interval]))'
)
_FILL = "sum by (model) (nestrec_kv_cache_used_{unit}) / sum by (model) (nestrec_kv_cache_{unit} > 0)"
SUCCESSFUL = 'outcome="ok"'
PANELS: list[tuple[str, str, dict[str, str]]] = [
    ("Successful responses", "reqps", {"{{route}}": _BY_ROUTE}),
    (
        "Shed, rejected and failed requests",
        "reqps",
        {"{{outcome}}": _NOT_SUCCESSFUL},
    ),
    (
        "Response time",
        "s",
        {
            f"p{q} {{{{route}}}}": _QUANTILE.format(
                q=q / 100, by="route", metric="nestrec_http_request_duration_seconds", where=SUCCESSFUL
            )
            for q in (50, 99)
        },
    ),
    (
        "Engine queue and compute time, P99",
        "s",
        {
            "queue {{model}}": _QUANTILE.format(
                q=0.99, by="model", metric="nestrec_engine_queue_duration_seconds", where=""
            ),
            "compute {{model}}": _QUANTILE.format(
                q=0.99, by="model", metric="nestrec_engine_compute_duration_seconds", where=""
            ),
            "transit {{model}}, P90": "max by (model) (nestrec_engine_transit_seconds)",
            "host {{model}}, per batch": "max by (model) (nestrec_engine_batch_host_seconds)",
        },
    ),
    (
        "Ranking requests by prefix-cache result",
        "reqps",
        {"{{cache_source}}": "sum by (cache_source) (rate(nestrec_rank_requests_total[$__rate_interval]))"},
    ),
    (
        "Pre-infer requests",
        "reqps",
        {"{{outcome}}": "sum by (outcome) (rate(nestrec_preinfer_requests_total[$__rate_interval]))"},
    ),
    ("Engine queue", "s", {"{{instance}} {{model}}": "sum by (instance, model) (nestrec_engine_queue_seconds)"}),
    (
        "Device utilization",
        "percentunit",
        {"{{instance}}": "sum by (instance) (rate(nestrec_engine_device_busy_seconds_total[$__rate_interval]))"},
    ),
    (
        "KV cache usage",
        "percentunit",
        {
            "device {{model}}": _FILL.format(unit="pages"),
            "host {{model}}": _FILL.format(unit="bytes"),
        },
    ),
    ("Resident memory", "bytes", {"{{instance}}": "process_resident_memory_bytes" + _OF}),
    ("Served versions", "short", {"{{model}} {{version}}": "count by (model, version) (nestrec_model_info)"}),
    ("Model age", "s", {"{{model}}": "time() - min by (model) (nestrec_model_exported_timestamp_seconds)"}),
    (
        "Freshness: event to response",
        "s",
        {
            "p50 {{model}}": _QUANTILE.format(q=0.5, by="model", metric="nestrec_model_freshness_seconds", where=""),
            "p99 {{model}}": _QUANTILE.format(q=0.99, by="model", metric="nestrec_model_freshness_seconds", where=""),
            "{{part}} {{model}}": "max by (model, part) (nestrec_model_freshness_part_seconds)",
        },
    ),
    (
        "Versions of followed models",
        "short",
        {
            "number {{instance}} {{model}}": "max by (instance, model) (nestrec_model_version_number)",
            "behind {{instance}} {{model}}": "max by (instance, model) (nestrec_model_versions_behind)",
            "{{method}} per minute": (
                "60 * sum by (method) (rate(nestrec_model_versions_applied_total[$__rate_interval]))"
            ),
        },
    ),
    (
        "Authentication failures",
        "reqps",
        {"{{reason}}": "sum by (reason) (rate(nestrec_auth_failures_total[$__rate_interval]))"},
    ),
    (
        "Row cache misses",
        "ops",
        {"{{table}}": "sum by (table) (rate(nestrec_table_row_misses_total[$__rate_interval]))"},
    ),
    (
        "Instances behind the gateway",
        "short",
        {
            "alive": "sum(nestrec_instance_up)",
            "requests {{slot}}": "sum by (slot) (nestrec_instance_inflight_requests)",
        },
    ),
    (
        "Requests routed to another instance",
        "reqps",
        {"{{event}}": "sum by (event) (rate(nestrec_gateway_events_total[$__rate_interval]))"},
    ),
]


def dashboard() -> dict[str, Any]:
    """Return the dashboard as JSON that Grafana imports."""
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
