"""The OpenAPI description that the endpoint serves. It is made from the schemas of its requests."""

from collections.abc import Mapping
from typing import Any

from unstale.rollout.endpoint.schemas import Schema

_EPISODES: Mapping[str, Schema] = {
    "/e/{episode}/v1": {
        "name": "episode",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
    },
    "/v1": {"name": "X-Episode", "in": "header", "schema": {"type": "string"}},
}
"""The OpenAPI parameter that names the episode, for each prefix of a path."""

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def describe(paths: Mapping[str, Schema | None]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document.

    `paths` maps each path to the schema of its request body, or to None for a GET request.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "unstale",
            "version": "1",
            "description": "An OpenAI-compatible API that records every token.",
        },
        "security": [{"key": []}],
        "paths": {
            prefix + path: {"get" if body is None else "post": _operation(prefix, path, body)}
            for prefix in _EPISODES
            for path, body in paths.items()
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                _name(path): _nullable(body) for path, body in paths.items() if body is not None
            },
            "responses": {"refused": {"description": "the reason", "content": _json(_ERROR)}},
        },
    }


def _operation(prefix: str, path: str, body: Schema | None) -> dict[str, Any]:
    answer: dict[str, Any] = _json({"type": "object"})
    operation: dict[str, Any] = {
        "operationId": _name(prefix + path),
        "parameters": [_EPISODES[prefix]],
        "responses": {
            "200": {"description": "the answer", "content": answer},
            "4XX": {"$ref": "#/components/responses/refused"},
        },
    }
    if body is not None:
        answer["text/event-stream"] = {}
        schema = {"$ref": f"#/components/schemas/{_name(path)}"}
        operation["requestBody"] = {"required": True, "content": _json(schema)}
    return operation


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _name(path: str) -> str:
    return "_".join(part for part in path.split("/") if part.isalpha())


def _nullable(schema: Any) -> Any:
    """Return the schema with null allowed for optional fields, because the endpoint allows it."""
    if isinstance(schema, list):
        return [_nullable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    nullable = {
        name: value if name == "enum" else _nullable(value) for name, value in schema.items()
    }
    for name, value in nullable.get("properties", {}).items():
        if value and name not in schema["required"]:
            nullable["properties"][name] = {"anyOf": [value, {"type": "null"}]}
    return nullable
