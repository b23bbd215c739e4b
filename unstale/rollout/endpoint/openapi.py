"""What the endpoint says of itself: the schemas that requests are checked with, as an OpenAPI description."""

from collections.abc import Mapping
from typing import Any

from unstale.rollout.endpoint.wire import Refused, Schema

_EPISODES: Mapping[str, Schema] = {
    "/e/{episode}/v1": {
        "name": "episode",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
    },
    "/v1": {"name": "X-Episode", "in": "header", "schema": {"type": "string"}},
}
"""Where the episode is named, by how an address begins."""


def describe(paths: Mapping[str, Schema | None]) -> dict[str, Any]:
    """OpenAPI 3.1. `paths` are those of one episode, with the schema of a body where one is sent."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "unstale",
            "version": "1",
            "description": "What is answered here is recorded.",
        },
        "security": [{"key": []}],
        "paths": {
            before + path: {"get" if body is None else "post": _operation(before, path, body)}
            for before in _EPISODES
            for path, body in paths.items()
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                _name(path): _nullable(body) for path, body in paths.items() if body is not None
            },
            "responses": {
                "refused": {
                    "description": "why, in words",
                    "content": _json(_shape(Refused("").body())),
                }
            },
        },
    }


def _operation(before: str, path: str, body: Schema | None) -> dict[str, Any]:
    answer: dict[str, Any] = _json({"type": "object"})
    asked: dict[str, Any] = {}
    if body is not None:
        answer["text/event-stream"] = {}
        asked["requestBody"] = {
            "required": True,
            "content": _json({"$ref": f"#/components/schemas/{_name(path)}"}),
        }
    return {
        **asked,
        "operationId": _name(before + path),
        "parameters": [_EPISODES[before]],
        "responses": {
            "200": {"description": "the answer", "content": answer},
            "4XX": {"$ref": "#/components/responses/refused"},
        },
    }


def _name(path: str) -> str:
    return "_".join(part for part in path.split("/") if part.isalpha())


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _shape(record: Any) -> Schema:
    """The schema of records that have the fields of this one."""
    if not isinstance(record, dict):
        return {"type": ["string", "null"]}
    return {
        "type": "object",
        "required": [*record],
        "properties": {name: _shape(value) for name, value in record.items()},
    }


def _nullable(schema: Any) -> Any:
    """Where null is as good as missing, it may be said."""
    if isinstance(schema, list):
        return [_nullable(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {name: _nullable(value) for name, value in schema.items() if name != "enum"} | (
        {"enum": schema["enum"]} if "enum" in schema else {}
    )
    for name, one in changed.get("properties", {}).items():
        if name not in schema["required"] and one:
            changed["properties"][name] = {"anyOf": [one, {"type": "null"}]}
    return changed
