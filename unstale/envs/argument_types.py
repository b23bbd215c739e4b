"""Convert the text arguments of a tool call to the types in the tool's JSON schema.

Tool libraries also write types as names of Python or Java, and as annotations such as
`Optional[list[int]]`. A schema that is not understood allows any type: text that is JSON is then
converted, and other text is kept.
"""

import ast
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import unquote, urljoin

from unstale.envs.strict_json import STRICT_DECODER, loads, read_float

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""

_MAX_SCHEMAS = 200
"""Largest number of subschemas that are read to find the type of a value."""
_MAX_NODES = 5_000
"""Largest number of nodes of a schema that are searched for a reference's target."""
_MAX_ANNOTATION = 200
"""Largest number of characters of a Python annotation that is read as a type."""
_MAX_LITERAL = 10_000
"""Largest number of characters of a Python literal that is read as a value."""
_TYPES = {
    "integer": "integer int long short byte bigint",
    "number": "number float double decimal",
    "boolean": "boolean bool",
    "string": "string str char text date time datetime uuid url uri email path",
    "array": "array list tuple arraylist set frozenset queue stack sequence iterable collection",
    "object": "object dict hashmap hashtable map mapping typeddict",
    "null": "null none nonetype",
}
_TYPE_OF = {word: name for name, words in _TYPES.items() for word in words.split()}
"""Name of a type in some tool library, in lower case -> type in JSON Schema."""


def schemas_of(tools: Iterable[Mapping[str, Any]]) -> Schemas:
    """Return name of a tool -> JSON schema of its arguments."""
    functions = [_mapping(tool.get("function", tool)) for tool in tools]
    return {str(each.get("name")): _mapping(each.get("parameters")) for each in functions}


def argument_value(text: str, name: str, parameters: Any) -> Any:
    """Return the value of a tool's argument, given as `text`, in the type of its schema.

    `name` is the argument. `parameters` is the schema of all arguments, in which references are
    looked up.
    """
    parameters = _mapping(parameters)
    others = parameters.get("additionalProperties")
    schema = _mapping(parameters.get("properties")).get(name, others)
    return typed_value(text, schema, parameters)


def typed_value(text: str, schema: Any, root: Any = None) -> Any:
    """Return the value of a `text` in the type of its schema.

    Text that does not fit the type is returned unchanged. Without a type in the schema, JSON is
    converted. References are looked up in `root`, by default in the schema itself.

    >>> typed_value("5", {"type": "integer"}), typed_value("5", {"type": "string"})
    (5, '5')
    >>> typed_value("True", {"type": "boolean"}), typed_value("None", {"type": ["string", "null"]})
    (True, None)
    """
    types = _TypeReader(schema if root is None else root).read(schema)
    if types == {"string"}:
        return text
    word = text.strip()
    if "boolean" in types and word in ("True", "False"):
        return word == "True"
    if "null" in types and word == "None":
        return None
    try:
        value = STRICT_DECODER.decode(word)
    except (ValueError, RecursionError):
        value = _literal(word) if {"array", "object"} & types else None
        if not isinstance(value, list | dict):
            return text
    if "string" in types and isinstance(value, str):
        return text
    if "integer" in types and isinstance(value, float) and value.is_integer():
        value = int(Decimal(word))  # a float has 16 digits
    return value if _type_of(value) & types or "any" in types else text


def _literal(text: str) -> Any:
    """Return the value of a Python list, tuple or dict literal. None for any other text."""
    if len(text) > _MAX_LITERAL or text[:1] not in ("[", "{", "("):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return literal_value(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def literal_value(tree: ast.expr, source: str) -> Any:
    """Return the value of a Python literal, in the types of JSON.

    `tree` is the literal's syntax tree, and `source` the text from which it was parsed. Raises
    `ValueError` for other code, and for numbers and names that `strict_json.loads` refuses.
    """
    try:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, float):
                read_float(ast.get_source_segment(source, node) or "0")
            if isinstance(node, ast.Dict):
                keys = [ast.literal_eval(key) for key in node.keys if key]
                if len(set(keys)) < len(keys):
                    raise ValueError("a name is given twice in one object")
        return loads(json.dumps(ast.literal_eval(tree), allow_nan=False))
    except TypeError as error:
        raise ValueError(str(error)) from error


class _TypeReader:
    """Finds the types that a schema allows.

    It reads at most `_MAX_SCHEMAS` subschemas, since references could lead to endlessly many.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MAX_SCHEMAS
        self._nodes_left = _MAX_NODES

    def read(self, schema: Any) -> set[str]:
        """Return the JSON types that a schema allows, or among them "any" if it does not restrict
        them.
        """
        self._left -= 1
        if self._left < 0:
            return {"any"}
        schema = _mapping(schema)
        parts = [_own_types(schema)]
        if isinstance(reference := schema.get("$ref"), str):
            parts.append(self.read(self._definition(reference)))
        for word in ("anyOf", "oneOf"):
            if choices := _choices(schema, word):
                parts.append(set().union(*map(self.read, choices)))
        parts += map(self.read, _choices(schema, "allOf"))
        narrow = [part for part in parts if "any" not in part]
        types = set.intersection(*narrow) if narrow else {"any"}.union(*parts)
        is_nullable = schema.get("nullable") or schema.get("default", "") is None
        return types | ({"null"} if is_nullable else set())

    def _definition(self, reference: str) -> Any:
        """Return the target of a reference such as `#/$defs/NAME`. None if it is unknown."""
        address, _, fragment = reference.partition("#")
        fragment = unquote(fragment)
        base = str(_mapping(self._root).get("$id", ""))
        found: Any = self._root
        if urljoin(base, address) != base:
            found = self._find(found, "$id", urljoin(base, address), base)
        if fragment and not fragment.startswith("/"):
            return self._find(found, "$anchor", fragment)
        for name in fragment.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal():
                found = dict(enumerate(found)).get(int(name))
            else:
                found = _mapping(found).get(name)
        return found

    def _find(self, schema: Any, key: str, wanted: str, base: str | None = None) -> Any:
        """Return the part of a schema in which `key` has the value `wanted`.

        With `base`, values are URLs relative to it. None if there is no such part, or if the search
        exceeds `_MAX_NODES`.
        """
        parts = [schema]
        while parts and self._nodes_left:
            self._nodes_left -= 1
            part = parts.pop()
            name = part.get(key) if isinstance(part, Mapping) else None
            if isinstance(name, str) and (name if base is None else urljoin(base, name)) == wanted:
                return part
            if isinstance(part, Mapping | list):
                parts += part.values() if isinstance(part, Mapping) else part
        return None


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows by its own `type`, `enum` or `const`, without
    references.
    """
    named = schema.get("type")
    if isinstance(named, str | list | tuple) and named:
        names = [named] if isinstance(named, str) else named
        return set().union(*(_named_types(str(each)) for each in names))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list | tuple) and values:
        return set().union(*map(_type_of, values))
    if isinstance(schema.get("properties"), Mapping):
        return {"object"}
    return {"array"} if "items" in schema else {"any"}


def _choices(schema: Mapping[str, Any], word: str) -> Sequence[Any]:
    choices = schema.get(word)
    return choices if isinstance(choices, list | tuple) else ()


def _named_types(name: str) -> set[str]:
    """Return the JSON types that a type's name or a Python annotation allows.

    >>> sorted(_named_types("Optional[str]")), _named_types("list[int]"), _named_types("Person")
    (['null', 'string'], {'array'}, {'any'})
    """
    if known := _TYPE_OF.get(name.lower()):
        return {known}
    try:
        return _annotated_types(ast.parse(name[: _MAX_ANNOTATION + 1].strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {"any"}


def _annotated_types(node: ast.expr) -> set[str]:
    match node:
        case ast.Name(word) | ast.Attribute(attr=word):
            return {_TYPE_OF.get(word.lower(), "any")}
        case ast.Constant(None):
            return {"null"}
        case ast.Constant(str(name)):
            return _named_types(name)
        case ast.BinOp(left, ast.BitOr(), right):
            return _annotated_types(left) | _annotated_types(right)
        case ast.Subscript(ast.Name(word) | ast.Attribute(attr=word), ast.Tuple(parts)):
            pass
        case ast.Subscript(ast.Name(word) | ast.Attribute(attr=word), part):
            parts = [part]
        case _:
            return {"any"}
    match word.lower():
        case "optional" | "union":
            nothing = {"null"} if word.lower() == "optional" else set()
            return nothing.union(*map(_annotated_types, parts))
        case "annotated" | "required" | "notrequired" | "final":
            return _annotated_types(parts[0])
        case "literal":
            return set().union(*(_type_of(ast.literal_eval(each)) for each in parts))
    return {_TYPE_OF.get(word.lower(), "any")}


def _type_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
