"""The formats in which chat templates write tool calls, found from examples.

`find_form` compares the texts that a template writes for a few calls, so it needs no list of
models. The formats are:

  - JSON objects in tags or alone, or a JSON list (Hermes, Qwen2.5, Qwen3, Llama 3, Mistral v3);
  - a name, then its arguments as JSON (Mistral v11 and later, Llama 3.1's `<function=NAME>`);
  - a tag for each argument (Qwen3-Coder, GLM-4.5);
  - Python calls in a list (Llama 3.2 and 4 with pythonic templates).
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from hashlib import sha256
from io import StringIO
from itertools import islice, takewhile
from keyword import iskeyword
from os.path import commonprefix
from tokenize import TokenError, generate_tokens
from typing import Any

from jinja2 import TemplateError

from unstale.envs import ToolCall
from unstale.envs.argument_types import Schemas, argument_value, literal_value
from unstale.envs.argument_types import typed_value as typed_value
from unstale.envs.strict_json import STRICT_DECODER

PROBE = ToolCall("a_tool", {"an_argument": "a_value"})
"""An example call. The text that a template writes for it shows the template's format."""

Write = Callable[[Sequence[ToolCall]], str]
"""A function that returns the text that a chat template writes for tool calls of one reply."""

_TWO_ARGUMENTS = ToolCall(PROBE.name, {**PROBE.arguments, "another": "more"})
_BARE = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
"""Pattern of the start of a tool call that is written as JSON without a tag."""
_SEPARATOR = re.compile(r"[\s;,]*")
_BARE_PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_JSON_WORDS = {"true": True, "false": False, "null": None}
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", *_ARGUMENTS, "id", "type"})
"""Usual keys of a JSON call. A call with another key is malformed, because it may mean an
argument.
"""
_MAX_ENDS = 64
"""Largest number of closing tags that are tried as the end of one call."""
_KEYWORD_MARK = "_keyword_argument"
_ID_LENGTH = 9
_EXCERPT = 40
"""Number of characters of a malformed call that its error shows."""


def call_id(index: int, given: str = "") -> str:
    """Return an id that every chat template can write for a tool call and its result.

    It has 9 letters or digits, which Mistral's templates require. It is `given` if that has this
    form, and otherwise a hash of `given`. Without `given`, it is the call's index in the message.
    """
    if not given:
        return f"{index:0{_ID_LENGTH}d}"
    return given if is_call_id(given) else hashed_id(given)


def is_call_id(text: str) -> bool:
    """Return True if every chat template can write `text` as the id of a tool call."""
    return len(text) == _ID_LENGTH and text.isascii() and text.isalnum()


def hashed_id(text: str) -> str:
    """Return the id of a tool call that is a hash of this text."""
    return sha256(text.encode(errors="replace")).hexdigest()[:_ID_LENGTH]


@dataclass(frozen=True, slots=True)
class CallForm:
    """A format of tool calls. `opens` and `closes` are the tags around a call, empty without
    tags.
    """

    opens: str = "<tool_call>"
    closes: str = "</tool_call>"

    def __str__(self) -> str:
        return re.sub(r">\s+<", "><", f"{self.opens}{self.body}{self.closes}")

    @property
    def body(self) -> str:
        """The text of a call between its tags, with placeholders for names and values."""
        raise NotImplementedError

    @property
    def first_character(self) -> str:
        """The first character of a call without tags."""
        return "{"

    def read_all(self, text: str, schemas: Schemas) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the content and the tool calls of a reply: its text outside of calls, and the
        calls.

        `schemas` gives the types of arguments that are written as text.
        """
        calls: list[ToolCall] = []
        content: list[str] = []
        at = 0
        while (start := text.find(self.opens, at)) >= 0:
            content.append(text[at:start])
            start += len(self.opens)
            found, at = self._read_one(text, start, schemas)
            calls += found
        content.append(text[at:])
        return "".join(content).strip(), tuple(calls)

    def _read_one(
        self, text: str, start: int, schemas: Schemas
    ) -> tuple[tuple[ToolCall, ...], int]:
        """Return the calls in the tag that opens before position `start`, and the position after
        the tag.

        A closing tag inside a string does not end a call, if the call can then be read.
        """
        first: tuple[tuple[ToolCall, ...], int] | None = None
        for end, after in islice(self._ends(text, start), _MAX_ENDS):
            calls = self.read(text[start:end], schemas)
            if not any(call.error for call in calls):
                return calls, after
            first = first or (calls, after)
        if first:
            return first
        return (_malformed(f"the call is not closed by {self.closes}"),), len(text)

    def _ends(self, text: str, start: int) -> Iterator[tuple[int, int]]:
        """Yield each possible end of a call that begins at `start`, with the end of its closing
        tag.
        """
        mark, length = self.closes or self.opens, len(self.closes)
        at = text.find(mark, start)
        while at >= 0:
            yield at, at + length
            at = text.find(mark, at + len(mark))
        if not self.closes:
            yield len(text), len(text)

    def read(self, text: str, schemas: Schemas) -> tuple[ToolCall, ...]:
        """Return the calls in `text`, which stood between an opening and a closing tag and does not
        include the tags. Malformed calls have an `error`.
        """
        raise NotImplementedError

    def read_bare(self, text: str, at: int) -> tuple[ToolCall, ...] | None:
        """Return the calls in a reply without tags, from position `at` on. None if it has no call.

        `at` is above 0 if the reply begins with a control token that marks calls.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class JsonCalls(CallForm):
    """Tool calls as JSON objects with the name and, under `key`, the arguments.

    With `is_list`, the calls of a reply form one JSON list.
    """

    key: str = "arguments"
    is_list: bool = False

    @property
    def body(self) -> str:
        call = f'{{"name": ..., "{self.key}": {{...}}}}'
        return f"[{call}, ...]" if self.is_list else call

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of these calls, one after the other."""
        records = ({"name": call.name, self.key: dict(call.arguments)} for call in calls)
        texts = (json.dumps(record, ensure_ascii=False) for record in records)
        return "\n".join(f"{self.opens}\n{text}\n{self.closes}" for text in texts)

    def read(self, text: str, schemas: Schemas) -> tuple[ToolCall, ...]:
        try:
            record = STRICT_DECODER.decode(text)
        except (ValueError, RecursionError) as error:
            return (_malformed(f"the call is not JSON: {error}"),)
        records = record if self.is_list and isinstance(record, list) else [record]
        return tuple(self._to_call(each) for each in records)

    def read_bare(self, text: str, at: int) -> tuple[ToolCall, ...] | None:
        is_marked = bool(at)
        calls: list[ToolCall] = []
        if not is_marked and not _BARE.match(text):
            return None
        while at < len(text) or not calls:
            try:
                record, at = STRICT_DECODER.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                calls.append(_malformed(f"the call is not JSON: {error}"))
                break
            if not is_marked and not calls and not {self.key, *_ARGUMENTS} & set(record):
                return None
            calls.append(self._to_call(record))
            if separator := _SEPARATOR.match(text, at):
                at = separator.end()
        return tuple(calls)

    def _to_call(self, record: Any) -> ToolCall:
        if not isinstance(record, dict):
            return _malformed("the call is not a JSON object")
        name = record.get("name")
        if not isinstance(name, str) or not name:
            return _malformed('the call has no "name"')
        others = sorted(set(record) - _KEYS - {self.key})
        if others:
            return _malformed(f'"{others[0][:_EXCERPT]}" is no key of a call: use "{self.key}"')
        keys = [key for key in dict.fromkeys((self.key, *_ARGUMENTS)) if key in record]
        if len(keys) > 1:
            return _malformed(f'the call has both "{keys[0]}" and "{keys[1]}"')
        arguments = record[keys[0]] if keys else {}
        if not isinstance(arguments, dict):
            return _malformed(f'"{keys[0]}" is not a JSON object')
        written_id = record.get("id")
        return ToolCall(name, arguments, id=written_id if isinstance(written_id, str) else "")


@dataclass(frozen=True, slots=True)
class NamedCalls(CallForm):
    """Tool calls as a name, the text `between`, and the arguments as JSON."""

    _: KW_ONLY
    between: str
    """Text between the name and the arguments. Where it has the id `call_id(0)`, a call may have
    any id.
    """

    @property
    def body(self) -> str:
        return f"NAME{self.between.replace(call_id(0), 'ID')}{{...}}"

    def read(self, text: str, schemas: Schemas) -> tuple[ToolCall, ...]:
        around_id = map(_spaced, self.between.split(call_id(0), 1))
        between = r"\s*(?P<id>[^\s\[\]<>{}]*?)\s*".join(around_id)
        pattern = rf"\s*(?P<name>[^\s<>{{}}\[\]]+?)\s*{between}(?P<arguments>.*)"
        found = re.match(pattern, text, re.DOTALL)
        if not found:
            return (_malformed(f"the call is not {self.body}: {text[:_EXCERPT]!r}"),)
        try:
            arguments = STRICT_DECODER.decode(found["arguments"])
        except (ValueError, RecursionError) as error:
            return (_malformed(f"the arguments are not JSON: {error}"),)
        if not isinstance(arguments, dict):
            return (_malformed("the arguments are not a JSON object"),)
        return (ToolCall(found["name"], arguments, id=found.groupdict().get("id", "")),)


@dataclass(frozen=True, slots=True)
class TaggedCalls(CallForm):
    """Tool calls with a tag for each argument. Values are text, and get their types from the
    schemas.
    """

    _: KW_ONLY
    name: tuple[str, str]
    """Texts before and after the tool's name. They may be empty."""
    key: tuple[str, str]
    """Texts before an argument's name, and between this name and the value."""
    value_closes: str
    body_closes: str
    """Text between the last argument and the closing tag. It may be empty."""
    padded: bool
    """True if an argument's value has lines of its own."""

    @property
    def body(self) -> str:
        name, key = "NAME".join(self.name), "KEY".join(self.key)
        return f"{name}{key}VALUE{self.value_closes}{self.body_closes}"

    def _ends(self, text: str, start: int) -> Iterator[tuple[int, int]]:
        # a value has no quotes, so it could also take up the calls that follow
        following = text.find(self.opens, start)
        ends = CallForm._ends(self, text, start)
        yield from takewhile(lambda end: following < 0 or end[0] <= following, ends)

    def read(self, text: str, schemas: Schemas) -> tuple[ToolCall, ...]:
        before, after = map(_spaced, self.name)
        head = re.match(rf"\s*{before}\s*([^\s<>]+)\s*{after}", text)
        if not head:
            return (_malformed(f"the call has no name: {text[:_EXCERPT]!r}"),)
        name, at = head[1], head.end()
        opens, closes = map(_spaced, self.key)
        ends = _spaced(self.body_closes) or r"\Z"
        argument = re.compile(
            rf"\s*{opens}([^<>]+?){closes}(.*?){_spaced(self.value_closes)}(?=\s*(?:{opens}|{ends}))",
            re.DOTALL,
        )
        arguments: dict[str, Any] = {}
        while found := argument.match(text, at):
            key, at = found[1].strip(), found.end()
            if key in arguments:
                return (_malformed(f"the argument {key!r} is given twice"),)
            value = found[2]
            if self.padded:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = argument_value(value, key, schemas.get(name))
        if not re.fullmatch(rf"\s*{_spaced(self.body_closes)}\s*", text[at:]):
            rest = text[at:].strip()[:_EXCERPT]
            wanted = f"{self.key[0]}...{self.value_closes}{self.body_closes}"
            return (_malformed(f"{wanted} is wanted in the call, not {rest!r}"),)
        return (ToolCall(name, arguments),)


@dataclass(frozen=True, slots=True)
class PythonCalls(CallForm):
    """Tool calls as a list of Python calls whose keyword arguments are literals.

    The words `true`, `false` and `null` of JSON are allowed, too.
    """

    @property
    def body(self) -> str:
        return "[NAME(KEY=VALUE, ...), ...]"

    @property
    def first_character(self) -> str:
        return "["

    def read(self, text: str, schemas: Schemas) -> tuple[ToolCall, ...]:
        try:
            with warnings.catch_warnings():
                # an escape sequence in the policy's text may cause a warning
                warnings.simplefilter("ignore")
                code = _without_keywords(text.strip())
                listed = ast.parse(code, mode="eval").body
            elements = listed.elts if isinstance(listed, ast.List) else [listed]
            return tuple(self._to_call(each, code) for each in elements)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return (_malformed(f"the call is not {self.body}: {error}"),)

    def read_bare(self, text: str, at: int) -> tuple[ToolCall, ...] | None:
        if not at and not _BARE_PYTHON.match(text):
            return None
        return self.read(text[at:], {})

    def _to_call(self, node: ast.expr, code: str) -> ToolCall:
        """Return the tool call that a syntax tree describes. `code` is the text of the whole list.

        Raises `ValueError` for arguments without a name, and for values that JSON cannot express.
        """
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("an element is not a call with keyword arguments")
        keys = [each.arg and each.arg.removesuffix(_KEYWORD_MARK) for each in node.keywords]
        if None in keys or len(set(keys)) < len(keys):
            raise ValueError("each argument must be given once, by its name")
        name = ast.unparse(node.func)
        if not re.fullmatch(r"[\w.]+", name):
            raise ValueError(f"{name[:_EXCERPT]!r} is no name")
        words = _JsonWords()
        arguments = {
            str(key): literal_value(words.visit(each.value), code)
            for key, each in zip(keys, node.keywords, strict=True)
        }
        return ToolCall(name, arguments)


def _without_keywords(text: str) -> str:
    """Return Python code in which arguments named like keywords, such as `from=`, get a suffix.

    Code that cannot be divided into tokens is returned unchanged.
    """
    try:
        tokens = list(generate_tokens(StringIO(text).readline))
    except (TokenError, SyntaxError):
        return text
    lines = text.splitlines(keepends=True)
    for token, following in zip(tokens[-2::-1], tokens[:0:-1], strict=True):
        if iskeyword(token.string) and following.string == "=":
            row, column = token.end
            line = lines[row - 1]
            lines[row - 1] = f"{line[:column]}{_KEYWORD_MARK}{line[column:]}"
    return "".join(lines)


class _JsonWords(ast.NodeTransformer):
    """Replaces `true`, `false` and `null` in a syntax tree by their Python values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def find_form(write: Write) -> CallForm | None:
    """Return the format in which a chat template writes tool calls, or None if it is unknown.

    `write` returns the text that the template writes for calls. Its errors are raised.
    """
    text = write([PROBE])
    form = _json_form(text)
    if form is not None:
        return form
    forms = (_named_form(text), _python_form(text), _tagged_form(write([_TWO_ARGUMENTS])))
    return next((each for each in forms if each and _reads_back(each, write)), None)


def _reads_back(form: CallForm, write: Write) -> bool:
    """Return True if `form` reads the same calls from the text that `write` returns for them."""
    empty = ToolCall(PROBE.name, {})
    for calls in ((PROBE,), (empty,), (_TWO_ARGUMENTS, empty)):
        try:
            text = write(calls)
        except TemplateError:
            if len(calls) == 1:
                raise
            continue  # a template may refuse several calls in one reply
        if (form.read_all(text, {})[1] if form.opens else form.read_bare(text, 0)) != calls:
            return False
    return True


def _json_form(text: str) -> JsonCalls | None:
    """Return the format of the JSON call in `text`, with its tags. None if `text` is no JSON
    call.
    """
    start = max(text.find("{"), 0)
    try:
        record, after = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None
    opens, closes = text[:start].strip(), text[after:].strip()
    keys = (
        [key for key, value in record.items() if value == PROBE.arguments]
        if isinstance(record, dict)
        else []
    )
    if not keys or record.get("name") != PROBE.name:
        return None
    is_list = opens.endswith("[") and closes.startswith("]")
    if is_list:
        opens, closes = opens[:-1].strip(), closes[1:].strip()
    if not opens and (closes or is_list):
        return None
    return JsonCalls(opens, closes, keys[0], is_list)


def _named_form(text: str) -> NamedCalls | None:
    """Return the format of a `text` with a name and then JSON. None if it is in another format."""
    opens, _, rest = text.partition(PROBE.name)
    start = max(rest.find("{"), 0)
    try:
        arguments, after = json.JSONDecoder().raw_decode(rest, start)
    except ValueError:
        return None
    between = rest[:start].strip()
    if arguments != PROBE.arguments or not opens.strip() or not between or '"' in between:
        return None
    return NamedCalls(opens.strip(), rest[after:].strip(), between=between)


def _python_form(text: str) -> PythonCalls | None:
    """Return the format of a `text` with a list of Python calls. None if it is in another
    format.
    """
    opens, bracket, rest = text.partition(f"[{PROBE.name}(")
    _, end, closes = rest.rpartition("]")
    return PythonCalls(opens.strip(), closes.strip()) if bracket and end else None


def _tagged_form(text: str) -> TaggedCalls | None:
    """Return the format of a `text` with a tag for each argument. None if it is in another format.

    The call in `text` has two arguments. The tag that opens an argument is what the text before the
    first argument and the text between the arguments both end with.
    """
    words = [_TWO_ARGUMENTS.name, *sum(_TWO_ARGUMENTS.arguments.items(), ())]
    found = re.fullmatch(f"(.*?){'(.*?)'.join(words)}(.*)", text, re.DOTALL)
    if not found:
        return None
    head, to_key, to_value, separator, to_other_value, tail = found.groups()
    shared = commonprefix([to_key[::-1], separator[::-1]])[::-1]  # noqa: RUF071 - by character
    key_opens = shared[shared.find("<") :].strip()
    if not key_opens.startswith("<") or to_value != to_other_value:
        return None
    value_closes = separator.rstrip().removesuffix(key_opens).strip()
    body_closes, tag, closes = tail.strip().removeprefix(value_closes).strip().rpartition("<")
    outer = re.match(r"(<[^<>\s]*>)?\s*(.*)", head.strip(), re.DOTALL)
    if not outer or not tag or not value_closes or not head.strip():
        return None
    return TaggedCalls(
        outer[1] or outer[2],
        tag + closes,
        name=(outer[2] if outer[1] else "", to_key.rstrip().removesuffix(key_opens).strip()),
        key=(key_opens, to_value.strip()),
        value_closes=value_closes,
        body_closes=body_closes.strip(),
        padded=to_value.endswith("\n") and separator.startswith("\n"),
    )


def _spaced(literal: str) -> str:
    """Return a pattern for `literal` that allows any amount of white space where it has some."""
    return r"\s*".join(map(re.escape, literal.split()))


def _malformed(reason: str) -> ToolCall:
    return ToolCall("", {}, error=reason)
