"""The OpenAPI 3.1 document, made from the routes and their models."""

from __future__ import annotations

from typing import Any

import msgspec

from rayqueue import __version__
from rayqueue.gateway.rest.problems import CONTENT_TYPE, Problem
from rayqueue.gateway.rest.route import Route
from rayqueue.gateway.rest.routes import ROUTES

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_ABOUT = """Topics, records, consumer groups and work queues of a RayQueue, for callers outside of its Ray cluster.

Errors are `application/problem+json`: `code` is stable, `retriable` says whether the same request may succeed later.
Times are milliseconds since 1970."""

_TAGS = {
    "topics": "Named logs, each of one or more partitions.",
    "records": "Publish, look, follow.",
    "groups": "Consumer groups, their positions and their lag.",
    "sessions": "Read as a member of a group, with explicit acknowledgement.",
    "queues": "Work queues: jobs that are leased to workers, retried, and kept as dead letters when all fails.",
    "cluster": "Brokers and what is wrong with them.",
    "health": "For load balancers.",
    "falconq": "FalconQ's routes, for programs that were written for it.",
}


def document() -> dict[str, Any]:
    wanted = [Problem]
    for route in ROUTES:
        wanted += [each for each in (route.params, route.body, route.answer) if each not in (None, bytes)]
    models = list(dict.fromkeys(wanted))
    refs, components = msgspec.json.schema_components(models, ref_template=_REF)
    schemas = dict(zip(models, refs, strict=True))
    parameters = {route.params: components[route.params.__name__] for route in ROUTES}
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas, parameters[route.params])
    for model in parameters:
        components.pop(model.__name__, None)
    return {
        "openapi": "3.1.0",
        "info": {"title": "RayQueue gateway", "version": __version__, "description": _ABOUT},
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "`rayqueue keys create`"}},
        },
    }


def _operation(route: Route, schemas: dict[Any, Any], params: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": route.operation_id,
        "summary": route.summary,
        "tags": [route.tag],
        "security": [] if route.public else [{"key": []}],
        "parameters": [
            *(_parameter(name, schema, route, params) for name, schema in params.get("properties", {}).items()),
            *(_header(name, text) for name, text in route.headers.items()),
        ],
        "responses": _responses(route, schemas),
    }
    if route.body is bytes:
        made["requestBody"] = {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}
    elif route.body is not None:
        content = {"schema": schemas[route.body]}
        if route.example is not None:
            content["example"] = route.example
        made["requestBody"] = {"required": True, "content": {_JSON: content}}
    return made


def _parameter(name: str, schema: dict[str, Any], route: Route, params: dict[str, Any]) -> dict[str, Any]:
    where = "path" if f"{{{name}}}" in route.path else "query"
    return {"name": name, "in": where, "required": name in params.get("required", ()), "schema": _not_null(schema)}


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter is given or left out; there is no null in a URL."""
    if "anyOf" not in schema:
        return schema
    (kept,) = (each for each in schema["anyOf"] if each.get("type") != "null")
    return dict(kept)


def _header(name: str, text: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1, "maxLength": 200}
    return {"name": name, "in": "header", "required": False, "description": text, "schema": schema}


def _responses(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    if route.stream:
        told: dict[str, Any] = {
            "description": "Events",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
        status = "200"
    elif route.answer is None:
        told, status = {"description": "Done"}, "204"
    else:
        content = {"schema": schemas[route.answer]}
        if route.answer_example is not None:
            content["example"] = route.answer_example
        told, status = {"description": "Done", "content": {_JSON: content}}, str(route.status)
    problem = {"description": "What went wrong", "content": {CONTENT_TYPE: {"schema": schemas[Problem]}}}
    return {status: told, "default": problem}
