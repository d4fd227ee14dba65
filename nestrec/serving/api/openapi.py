"""The OpenAPI description of the front."""

from typing import Any

from nestrec.serving.api.schema import LimitsConfig


def openapi(limits: LimitsConfig) -> dict[str, Any]:
    item = {"type": ["string", "integer"]}
    ints = {"type": "array", "items": {"type": "integer"}}
    categories = {"type": "object", "description": "category name to a list of values, one an event or candidate"}
    history = {
        "type": "object", "additionalProperties": False,
        "properties": {
            "items": {"type": "array", "items": item, "maxItems": limits.max_history},
            "times_ms": ints, "actions": ints, "features": categories,
        },
    }  # fmt: skip
    common: dict[str, Any] = {
        "user": {"type": ["string", "integer"], "description": f"1 to {limits.max_user_characters} characters"},
        "history": history,
        "user_features": {"type": "object"},
        "now_ms": {"type": "integer", "minimum": 0},
        "timeout_ms": {"type": "integer", "minimum": 1, "maximum": limits.max_timeout_ms},
    }
    candidates = {"type": "array", "items": item, "minItems": 1, "maxItems": limits.max_candidates}
    count = {"type": "integer", "minimum": 1, "maximum": limits.max_candidates}
    k = {"type": "integer", "minimum": 1, "maximum": limits.max_k}
    ranked = {"candidates": candidates, "candidate_features": categories}
    wanted = {"k": k, "exclude_seen": {"type": "boolean"}, "candidate_features": categories}
    kept = {"user": common["user"], "history": history}
    return {
        "openapi": "3.1.0",
        "info": {"title": "nestrec", "version": "1"},
        "paths": {
            "/v1/rank": _post("Scores of candidates, in their order", {**common, **ranked}, ["user", "candidates"]),
            "/v1/preinfer": _post("A request is on its way", {**common, "num_candidates": count}, ["user"], "202"),
            "/v1/events": _post("Events kept for requests without a history", kept, ["user", "history"], "202"),
            "/v1/recommend": _post("The best items, best first", {**common, **wanted}, ["user"]),
            "/v1/users/{id}/cache": _delete("Forget the prefixes that were computed for a user"),
            "/v1/users/{id}/events": _delete("Forget the events that are kept of a user"),
            "/health/live": _get("The process runs"), "/health/ready": _get("Requests can be served"),
            "/metrics": _get("Prometheus"), "/v1/status": _get("What the live page shows"),
        },
    }  # fmt: skip


def _post(summary: str, properties: dict[str, Any], required: list[str], status: str = "200") -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    refused = {"429": "come back after Retry-After seconds", "503": "come back after Retry-After seconds"}
    described = {status: summary, "400": "the request is wrong", "413": "the body is too long", **refused}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {code: {"description": text} for code, text in described.items()},
        }
    }


def _delete(summary: str) -> dict[str, Any]:
    user = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {"delete": {"summary": summary, "parameters": [user], "responses": {"204": {"description": "forgotten"}}}}


def _get(summary: str) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {"200": {"description": summary}}}}
