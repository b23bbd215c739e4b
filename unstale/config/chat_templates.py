"""The chat templates of this package, for models that have none."""

from pathlib import Path

from unstale.config.checks import ConfigError

_CALLS = """\
{%- macro calls(message) %}{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{%- endmacro %}
{%- macro schemas() %}{{- 'You can call these tools:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\nTo call one, write\\n<tool_call>\\n' }}
{{- '{"name": "its name", "arguments": {...}}\\n</tool_call>' }}
{%- endmacro %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
"""

PLAIN = (
    _CALLS
    + """\
{%- if tools %}{{- system + ('\\n\\n' if system else '') }}{{- schemas() + '\\n\\n' }}
{%- elif system %}{{- system + '\\n\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- 'Assistant:\\n' + message.content + calls(message) + eos_token + '\\n\\n' }}
{%- elif message.role == 'user' %}{{- 'User: ' + message.content + '\\n\\n' }}
{%- elif message.role == 'tool' %}{{- 'Tool: ' + message.content + '\\n\\n' }}
{%- elif not loop.first %}{{- message.content + '\\n\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:\\n' }}{%- endif %}"""
)
"""A template of plain text: paragraphs that begin with `User: `, `Assistant:` or `Tool: `. The
tokenizer's end token after a reply is its only control token.
"""
CHATML = (
    _CALLS
    + """\
{%- if tools %}{{- '<|im_start|>system\\n' + system + ('\\n\\n' if system else '') }}
{{- schemas() + '<|im_end|>\\n' }}
{%- elif system %}{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content + calls(message) + '<|im_end|>\\n' }}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
"""The template ChatML, with messages between the control tokens <|im_start|> and <|im_end|>."""

PYTHON_CALLS = (
    "{%- if messages[0]['role'] == 'system' %}{% set text = messages[0]['content'] %}"
    "{% set rest = messages[1:] %}{% else %}{% set text = '' %}{% set rest = messages %}"
    "{% endif -%}\n{%- if text or tools %}{{ '<|im_start|>system\\n' + text }}"
    "\n{%- for tool in tools or [] %}"
    "{%- set known = tool.function.parameters | default({}, true) %}"
    "{{ '\\n' + tool.function.name + '(' + (known.properties | default({}, true) | join(', ')) "
    "+ '): ' + (tool.function.description | default('', true)) }}{% endfor -%}"
    "\n{{ '<|im_end|>\\n' }}"
    "{% endif -%}\n{%- for message in rest %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "\n{%- if message.tool_calls %}{{ '[' }}{% for call in message.tool_calls %}"
    "{{ ', ' if not loop.first }}{{ call.function.name + '(' }}"
    "{% for key, value in call.function.arguments.items() %}{{ ', ' if not loop.first }}"
    "{{ key + '=' + (value | tojson) }}{% endfor %}{{ ')' }}{% endfor %}{{ ']' }}{% endif -%}"
    "\n{{ '<|im_end|>\\n' }}{% endfor -%}\n{%- if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif -%}"
)
"""ChatML with short prompts. Each tool is described by one line with the names of its arguments,
and called as in Python, such as [calculate(expression="12 + 7")].
"""

NAMED = {"plain": PLAIN, "chatml": CHATML, "python_calls": PYTHON_CALLS}
"""The chat templates of this package, by the value of the option `chat_template`."""
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CONTROL_TOKENS = {"plain": (), "chatml": _CHATML_TOKENS, "python_calls": _CHATML_TOKENS}
"""For each template in `NAMED`, the control tokens that a tokenizer's vocabulary must have
for it.
"""


def read_template(value: str) -> str:
    """Return the text of a chat template, or its name if it is in `NAMED`.

    `value` is such a name, the text itself, "" or the path of a file with the text. Raises
    `ConfigError` if the file cannot be read or is not a template.
    """
    if value in ("", *NAMED) or "{" in value:
        return value
    path = Path(value)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"chat_template must be {', '.join(NAMED)} or a file with a Jinja template, got "
            f"{value}: {reason}"
        ) from error
    if "{" not in text:
        raise ConfigError(f"chat_template: {path} is no Jinja template: it writes no message")
    return text
