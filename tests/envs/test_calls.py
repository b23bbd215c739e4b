"""Test the formats of tool calls.

A format is found from the template and reads what it writes. Values in tags have the types of the
tool's schema. A malformed call says why, and no text makes parsing fail. A stream never sends text
that becomes part of a call.
"""

import random
from typing import Any

import pytest

from tests.support.templates import DIALECTS, GLM, MISTRAL, ends_of, tokenizer_of
from unstale.envs import Message, ToolCall
from unstale.envs.argument_types import argument_value, schemas_of, typed_value
from unstale.envs.calls import JsonCalls, NamedCalls, PythonCalls, call_id
from unstale.envs.chat import Chat
from unstale.envs.strict_json import loads
from unstale.rewards import json_schema

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "items": {"type": "array"},
    "any": {},
}
TOOL = {"type": "function", "function": {"name": "do", "parameters": {"properties": PROPERTIES}}}
ALL = {
    "text": "5\n",
    "count": 3,
    "ratio": 0.5,
    "flag": True,
    "maybe": None,
    "items": ["</b>", {"a": None}],
    "any": {"x": "y"},
}
FORMS = {
    "qwen3-coder": "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function>"
    "</tool_call>",
    "glm": "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
    "mistral": "[TOOL_CALLS]NAME[ARGS]{...}",
    "mistral-ids": "[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}",
    "mistral-v3": '[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]',
    "llama-function": "<function=NAME>{...}</function>",
    "llama-pythonic": "[NAME(KEY=VALUE, ...), ...]",
}


def chat_of(dialect: str, template: str = "") -> Chat:
    tokenizer = tokenizer_of(dialect, template)
    return Chat(tokenizer, [TOOL], ends=ends_of(tokenizer))


def written(chat: Chat, *calls: ToolCall) -> str:
    """Return a reply with calls as the template writes it."""
    messages = [Message("user", "?"), Message("assistant", "", calls)]
    text = chat.render(messages, add_generation_prompt=False)
    return text[len(chat.render(messages[:1])) :]


@pytest.mark.parametrize("dialect", FORMS)
def test_a_form_is_found_and_reads_what_the_template_writes(dialect: str) -> None:
    chat = chat_of(dialect)
    assert str(chat.call_form) == FORMS[dialect]
    for call in (ToolCall("do", ALL), ToolCall("do", {}), ToolCall("do", {"any": "some text"})):
        assert chat.parse(chat.encode(written(chat, call))).tool_calls == (call,)


READ = [
    ("qwen3-coder", "<tool_call><function=do></function></tool_call>", [{}]),
    (
        "qwen3-coder",
        "Now.\n<tool_call>\n<function=do>\n<parameter=text>\n\n <parameter=\n\n</parameter>\n"
        "<parameter=count>7</parameter>\n</function>\n</tool_call>",
        [{"text": "\n <parameter=\n", "count": 7}],
    ),
    ("glm", "<tool_call>do</tool_call>\n<tool_call>do\n</tool_call>", [{}, {}]),
    (
        "glm",
        "<tool_call>do <arg_key>ratio</arg_key><arg_value> 1</arg_value>"
        "<arg_key>new</arg_key><arg_value>[1]</arg_value></tool_call>",
        [{"ratio": 1, "new": [1]}],
    ),
    ("mistral", '[TOOL_CALLS]do[ARGS]{"count": 1}[TOOL_CALLS] do [ARGS] {}', [{"count": 1}, {}]),
    ("mistral-ids", '[TOOL_CALLS]do[CALL_ID]a1B2c3D4e[ARGS]{"a": "[ARGS]"}', [{"a": "[ARGS]"}]),
    (
        "mistral-v3",
        '[TOOL_CALLS] [{"arguments": {"x": 1}, "name": "do", "id": "abc"}, {"name": "do"}]',
        [{"x": 1}, {}],
    ),
    ("mistral-v3", '[TOOL_CALLS] {"name": "do"}', [{}]),
    ("llama-function", '<function=do>{"a": "<b>"}</function>', [{"a": "<b>"}]),
    ("llama-pythonic", "[do(a=[1, None], b=True), do(c='x', d=null)]", None),
]


@pytest.mark.parametrize(("dialect", "text", "arguments"), READ)
def test_calls_are_read_as_models_write_them(dialect: str, text: str, arguments: Any) -> None:
    calls = chat_of(dialect).reader.parse_text(text)[1].tool_calls
    arguments = arguments or [{"a": [1, None], "b": True}, {"c": "x", "d": None}]
    assert calls == tuple(ToolCall("do", each) for each in arguments)


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


MALFORMED = [
    ("qwen3-coder", tagged("<function=do>")[:-4], "the call is not closed by </tool_call>"),
    ("qwen3-coder", tagged('{"name": "do"}'), "the call has no name: "),
    ("qwen3-coder", tagged("<function=do>"), "<parameter=...</parameter></function> is wanted"),
    ("qwen3-coder", tagged("<function=do>x</function>"), "<parameter=...</parameter></function>"),
    (
        "qwen3-coder",
        tagged("<function=do>" + "<parameter=a>1</parameter>" * 2 + "</function>"),
        "the argument 'a' is given twice",
    ),
    ("glm", tagged(""), "the call has no name"),
    ("glm", tagged("do\n<arg_key>a</arg_key>\n<arg_value>1"), "<arg_key>...</arg_value> is wanted"),
    ("mistral", "[TOOL_CALLS]do", "the call is not NAME[ARGS]{...}: 'do'"),
    ("mistral", "[TOOL_CALLS]do[ARGS]{", "the arguments are not JSON"),
    ("mistral", "[TOOL_CALLS]do[ARGS][1]", "the arguments are not a JSON object"),
    ("mistral-v3", "[TOOL_CALLS] [1]", "the call is not a JSON object"),
    ("mistral-v3", '[TOOL_CALLS] [{"name": "do"}', "the call is not JSON"),
    ("llama-pythonic", "[do(a=b)]", "the call is not [NAME(KEY=VALUE, ...), ...]: "),
    ("llama-pythonic", "[do(1)]", "the call is not [NAME(KEY=VALUE, ...), ...]: "),
    ("llama-pythonic", "[do(**{'a': 1})]", "the call is not [NAME(KEY=VALUE, ...), ...]: "),
    ("llama-pythonic", "[do(a=1, a=2)]", "the call is not [NAME(KEY=VALUE, ...), ...]: "),
    ("llama-pythonic", "[do(a={1})]", "the call is not [NAME(KEY=VALUE, ...), ...]: "),
    ("llama-pythonic", "[do(a=1e999)]", "the call is not [NAME(KEY=VALUE, ...), ...]: "),
    ("llama-pythonic", f"[do(a={'(' * 9000}", "the call is not [NAME(KEY=VALUE, ...), ...]: "),
]


@pytest.mark.costly
@pytest.mark.parametrize(("dialect", "text", "reason"), MALFORMED)
def test_malformed_calls_say_why(dialect: str, text: str, reason: str) -> None:
    (call,) = chat_of(dialect).reader.parse_text(text)[1].tool_calls
    assert (call.name, dict(call.arguments)) == ("", {})
    assert call.error.startswith(reason)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("many", {"type": "integer"}, "many"),
        ("NaN", {"type": "number"}, "NaN"),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("True", {}, "True"),
        ("1", {"type": "boolean"}, "1"),
        ("null", {"type": ["string", "null"]}, None),
        ("5", {"type": ["string", "null"]}, "5"),
        ("None", {"type": "string", "nullable": True}, None),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ('{"a": 1, "a": 2}', {"type": "object"}, '{"a": 1, "a": 2}'),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("[5]", None, [5]),
        ("words", None, "words"),
    ],
)
def test_values_in_tags_have_the_types_of_the_schema(text: str, schema: Any, value: Any) -> None:
    found = typed_value(text, schema)
    assert found == value and type(found) is type(value)


@pytest.mark.costly
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_sends_no_text_that_becomes_a_call(dialect: str) -> None:
    chat = chat_of(dialect)
    call = ToolCall("do", {"text": "x"})
    tags = "" if dialect.startswith(("llama3.", "llama-pythonic")) else "Let me see."
    whole = tags + chat.text(chat.encode(written(chat, call)))
    for size in range(len(whole) + 1):
        _, sent = chat.reader.parse_partial(whole[:size])
        assert chat.reader.parse_text(whole)[1].content.startswith(sent)
    if tags and not chat.thinks:
        assert sent == tags


@pytest.mark.parametrize("dialect", FORMS)
def test_no_text_makes_parsing_fail(dialect: str) -> None:
    chat = chat_of(dialect)
    draw = random.Random(0)
    whole = written(chat, ToolCall("do", ALL))
    pieces = [whole[at : at + 3] for at in range(0, len(whole), 3)]
    for _ in range(200):
        text = "".join(draw.choice(pieces) for _ in range(draw.randrange(30)))
        cut = draw.randrange(len(whole))
        for each in (text, whole[:cut] + text, whole[:cut] + whole[cut + draw.randrange(9) :]):
            assert chat.reader.parse_text(each)[1].role == "assistant"
            chat.reader.parse_partial(each)


def test_an_answer_that_looks_like_a_list_is_no_python_call() -> None:
    chat = chat_of("llama-pythonic")
    for text in ("[1, 2]", "[see (1)]", "[a link](there)"):
        assert chat.reader.parse_text(text)[1] == Message("assistant", text)


def test_replies_of_glm_end_with_the_header_of_the_next_turn() -> None:
    chat = chat_of("glm")
    user, tool = (
        chat.encode_continuation([Message(role, "x")], ended=True)  # type: ignore[arg-type]
        for role in ("user", "tool")
    )
    assert chat.text(user, whole=True) == "\nx<|assistant|>"
    assert chat.text(tool, whole=True).startswith("\n<tool_response>\nx")
    cut = chat.encode_continuation([Message("tool", "x")], ended=False)
    assert chat.text(cut, whole=True).startswith("<|observation|>\n<tool_response>")


def test_results_carry_the_ids_of_their_calls() -> None:
    chat = chat_of("mistral-ids")
    call = ToolCall("do", {})
    history = [Message("user", "?"), Message("assistant", "", (call, call))]
    results = [Message("tool", "a"), Message("tool", "b")]
    text = chat.render([*history, *results])
    assert text.index(f"[CALL_ID]{call_id(1)}") < text.index(f"[TOOL_RESULTS]{call_id(0)}")
    appended = chat.encode_continuation(results, ended=True)
    assert text.endswith(chat.text(appended, whole=True)) and call_id(1) in text


def test_variables_reach_the_template_and_unknown_ones_are_refused() -> None:
    tokenizer = tokenizer_of("glm")
    question = [Message("user", "?")]
    chat = Chat(tokenizer, [TOOL], template_kwargs={"enable_thinking": False})
    assert chat.render(question).endswith("<|assistant|>\n<think></think>")
    assert (
        chat.reader.parse_partial("\nHello")[1] == ""
        and chat.reader.parse_partial("Hello")[1] == "Hello"
    )
    assert chat.reader.parse_text("Hello </think>") == (
        None,
        Message("assistant", "Hello </think>"),
    )
    thinking = Chat(tokenizer, [TOOL])
    assert thinking.render(question).endswith("<|assistant|>")
    assert thinking.with_tools([TOOL], {"enable_thinking": False}).render(question) == chat.render(
        question
    )
    with pytest.raises(ValueError, match="the chat template does not read 'enable_thinkin'"):
        Chat(tokenizer, [], template_kwargs={"enable_thinkin": False})
    with pytest.raises(ValueError, match="cannot set 'tokenize'"):
        Chat(tokenizer_of("glm", GLM + "{# tokenize #}"), [], template_kwargs={"tokenize": True})


def test_a_template_that_loses_arguments_has_no_known_form() -> None:
    lossy = MISTRAL.replace(
        "(call.function.arguments | tojson)",
        "((call.function.arguments if call.function.arguments | length == 1 else {}) | tojson)",
    )
    with pytest.raises(ValueError, match=r"writes a call as '\[TOOL_CALLS\]a_tool"):
        chat_of("mistral", lossy)


def test_python_keywords_may_name_arguments() -> None:
    form = PythonCalls("", "")
    (call,) = form.read("[f(from='is=1', class = 2, lambda_=3)]", {})
    assert call == ToolCall("f", {"from": "is=1", "class": 2, "lambda_": 3})
    assert form.read("[f(from=1, from=2)]", {})[0].error
    assert form.read("[f(x=lambda: 1)]", {})[0].error


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "INTEGER"}, 5),
        ("5.5", {"type": "float"}, 5.5),
        ('{"a": 1}', {"type": "dict"}, {"a": 1}),
        ("('a', 1)", {"type": "tuple"}, ["a", 1]),
        ("5", {"type": "String"}, "5"),
        ("5", {"type": "any"}, 5),
        ("5", {"allOf": [{"type": "string"}]}, "5"),
        ("1", {"const": "1"}, "1"),
        ("1", {"$ref": "#/$defs/Code"}, "1"),
        ("5", {"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]}, 5),
        ("1", {"$ref": "#/$defs/Loop"}, 1),
        ("1", {"$ref": "#/properties/code"}, "1"),
        ("1", {"$ref": "#/$defs/Unknown"}, 1),
        ("1", {"$ref": "#/$defs/A%20code"}, "1"),
        ("1", {"$ref": "#/$defs/a~1b~0c%25"}, "1"),
        ("1", {"$ref": "#code"}, "1"),
        ("1", {"$ref": "https://a.b/code.json"}, "1"),
        ("1", {"$ref": "code.json#"}, "1"),
        ("1", {"$ref": "#/$defs/Choice/anyOf/1"}, "1"),
        ("1", {"$ref": "#/$defs/Choice/anyOf/2"}, 1),
        ("5", {"type": "str | None"}, "5"),
        ("None", {"type": "str | None"}, None),
        ("5", {"type": "Optional[str]"}, "5"),
        ("5", {"type": "typing.Union[str, None]"}, "5"),
        ("5", {"type": "Optional[int]"}, 5),
        ("[5]", {"type": "list[int]"}, [5]),
        ("5", {"type": "list[int]"}, "5"),
        ('{"a": 5}', {"type": "Dict[str, int]"}, {"a": 5}),
        ("5", {"type": "Literal['5', '6']"}, "5"),
        ("5", {"type": "Literal[5, 6]"}, 5),
        ("2024", {"type": "date"}, "2024"),
        ("5", {"type": "Annotated[str, 'a code']"}, "5"),
        ("5", {"type": "a b"}, 5),
        ("12345678901234567890.0", {"type": "integer"}, 12345678901234567890),
        ("1e-999", {"type": "number"}, "1e-999"),
        ("0e-999", {"type": "number"}, 0.0),
        ("1e999", {"type": "number"}, "1e999"),
        ("[1e999]", {"type": "array"}, "[1e999]"),
    ],
)
def test_types_are_read_as_tool_libraries_write_them(text: str, schema: Any, value: Any) -> None:
    definitions = {
        "Code": {"enum": ["1", "2"]},
        "A code": {"type": "string"},
        "a/b~c%": {"type": "string"},
        "Named": {"$anchor": "code", "$id": "code.json", "type": "string"},
        "Choice": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "Count": {"type": "int"},
        "Loop": {"allOf": [{"$ref": "#/$defs/Loop"}] * 4},
    }
    code = {"enum": ["1", "2"]}
    fields = {"x": schema, "code": code}
    parameters = {"$id": "https://a.b/tool.json", "properties": fields, "$defs": definitions}
    found = schemas_of([{"function": {"name": "f", "parameters": parameters}}])["f"]
    read = argument_value(text, "x", found)
    assert read == value and type(read) is type(value)


def test_arguments_that_a_schema_does_not_name_have_the_type_of_all_others() -> None:
    parameters = {"properties": {}, "additionalProperties": {"type": "string"}}
    assert argument_value("5", "x", parameters) == "5"
    assert argument_value("5", "x", {"additionalProperties": False}) == 5
    assert argument_value("5", "x", None) == 5


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_numbers_that_are_not_finite_make_a_call_malformed(number: str) -> None:
    text = f'{{"name": "f", "arguments": {{"x": [{number}]}}}}'
    assert JsonCalls().read(text, {})[0].error.startswith("the call is not JSON")
    bare = JsonCalls("", "").read_bare(text, 0)
    assert bare and bare[0].error
    assert PythonCalls().read(f"[f(x={number})]", {})[0].error
    named = NamedCalls("[TOOL_CALLS]", "", between="[ARGS]")
    assert named.read(f'f[ARGS]{{"x": {number}}}', {})[0].error
    with pytest.raises(ValueError, match=r"is no number|too large"):
        loads(text)
    assert loads('{"x": 1e308}') == {"x": 1e308}
    assert json_schema(f"[{number}]", {"type": "array"}) == 0


@pytest.mark.parametrize(
    "value", ['{"a": 1, "a": 2}', "[1e-999]", r'"\ud800"', '{"a": {"b": 0, "b": 0}}']
)
def test_a_value_that_would_change_in_silence_makes_a_call_malformed(value: str) -> None:
    assert JsonCalls().read(f'{{"name": "f", "arguments": {{"x": {value}}}}}', {})[0].error
    assert PythonCalls().read(f"[f(x={value})]", {})[0].error
    assert typed_value(value, {"type": ["object", "array", "string"]}) == value
    assert json_schema(value, {}) == 0
    with pytest.raises(ValueError, match=r"twice|too small|half of a character"):
        loads(value)
    good = '{"a": [0.0, 1, "\\ud83d\\ude42", {"a": -0.5e-9}]}'
    assert typed_value(good, {}) == loads(good) and json_schema(good, {}) == 1
    assert PythonCalls().read(f"[f(x={loads(good)})]", {})[0].arguments["x"]


def test_no_argument_of_a_json_call_is_dropped() -> None:
    form = JsonCalls()
    assert form.read('{"name": "f", "parameters": {"x": 1}}', {}) == (ToolCall("f", {"x": 1}),)
    for text in (
        '{"name": "f", "args": {"x": 1}}',
        '{"name": "f", "x": 1}',
        '{"name": "f", "arguments": {}, "parameters": {"x": 1}}',
    ):
        assert form.read(text, {})[0].error, text


def test_a_closing_tag_in_a_string_does_not_end_a_call() -> None:
    form = JsonCalls()
    calls = (ToolCall("f", {"x": "a</tool_call><tool_call>"}), ToolCall("g", {}))
    assert form.read_all(form.write(calls), {}) == ("", calls)
    broken = '<tool_call>{"name": </tool_call><tool_call>{"name": "g"}</tool_call>'
    first, second = form.read_all(broken, {})[1]
    assert first.error and second == ToolCall("g", {})
