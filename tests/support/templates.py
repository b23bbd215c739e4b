"""Tokenizers with chat templates like those of Qwen3, Qwen2.5, Llama 3, 3.1 and 3.2.

The templates are rewritten for these tests. Their turns, tags, tool calls, thoughts and dates are
those of the originals; default system messages and instructions on tools are worded differently.
"""

from typing import Any

from transformers import AutoTokenizer

from unstale.config import SHIPPED_POLICY

CALLS = r"""{%- macro calls(message) %}
{%- for call in message.tool_calls or [] %}
{{- '\n' if message.content or not loop.first }}
{{- '<tool_call>\n{"name": "' + call.function.name }}
{{- '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{%- endmacro %}
{%- macro told(index) %}
{%- set message = messages[index] %}
{{- '<|im_start|>user' if index == 0 or messages[index - 1].role != 'tool' }}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{{- '<|im_end|>\n' if index + 1 == messages | length or messages[index + 1].role != 'tool' }}
{%- endmacro %}
{%- macro schemas() %}{{- '# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools>\nCalls stand in <tool_call></tool_call>.<|im_end|>\n' }}{%- endmacro %}"""
"""Macros that both Qwen templates use."""

QWEN3 = (
    CALLS
    + r"""
{%- set first = messages[0] if messages[0].role == 'system' else none %}
{%- if tools %}{{- '<|im_start|>system\n' + (first.content + '\n\n' if first else '') }}
{{- schemas() }}
{%- elif first %}{{- '<|im_start|>system\n' + first.content + '<|im_end|>\n' }}{%- endif %}
{%- set last = namespace(query=messages | length - 1, found=false) %}
{%- for index in range(messages | length - 1, -1, -1) %}
{%- set text = messages[index].content %}
{%- set answer = text.startswith('<tool_response>') and text.endswith('</tool_response>') %}
{%- if not last.found and messages[index].role == 'user' and not answer %}
{%- set last.query, last.found = index, true %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set text, thoughts = message.content, message.reasoning_content or '' %}
{%- if message.reasoning_content is not string and '</think>' in text %}
{%- set thoughts = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{%- set thinks = loop.index0 > last.query and (loop.last or thoughts) %}
{{- '<|im_start|>assistant\n' }}
{%- if thinks %}{{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + text.lstrip('\n') }}
{%- else %}{{- text }}{%- endif %}{{- calls(message) + '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}{{- told(loop.index0) }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)

QWEN25 = (
    CALLS
    + r"""
{%- set system = 'Help as well as you can.' %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- endif %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}{{- '\n\n' }}{{- schemas() }}{%- else %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant' + ('\n' + message.content if message.content else '') }}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}{{- told(loop.index0) }}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)

LLAMA3 = r"""{%- for message in messages %}{{- bos_token if loop.first }}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
"""A template without tools."""

LLAMA31 = r"""{{- bos_token }}
{%- macro head(role) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{%- endmacro %}
{%- set day = date_string if date_string is defined else '26 Jul 2024' %}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- head('system') + ('Environment: ipython\n' if tools else '') }}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + day + '\n\n' + system + '<|eot_id|>' }}
{%- if tools %}{{- head('user') + 'Functions, to be called with JSON:\n\n' }}
{%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\n\n' }}{%- endfor %}
{{- rest[0].content | trim + '<|eot_id|>' }}{%- set rest = rest[1:] %}{%- endif %}
{%- for message in rest %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- head('assistant') + '{"name": "' + call.name }}
{{- '", "parameters": ' + (call.arguments | tojson) + '}' }}
{{- '<|eom_id|>' if builtin_tools is defined else '<|eot_id|>' }}
{%- elif message.role in ('tool', 'ipython') %}
{{- head('ipython') + (message.content | tojson) + '<|eot_id|>' }}
{%- else %}{{- head(message.role) + message.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant') }}{%- endif %}"""

LLAMA32 = LLAMA31.replace("else '26 Jul 2024'", "else strftime_now('%d %b %Y')")
"""As LLAMA31, with today's date in the prompt."""

_LLAMA = (
    "begin_of_text",
    "end_of_text",
    "start_header_id",
    "end_header_id",
    "eom_id",
    "eot_id",
    "python_tag",
)
_TEMPLATES = {
    "qwen3": QWEN3,
    "qwen2.5": QWEN25,
    "llama3": LLAMA3,
    "llama3.1": LLAMA31,
    "llama3.2": LLAMA32,
}
DIALECTS = ("shipped", *_TEMPLATES)


def tokenizer_of(dialect: str, template: str = "") -> Any:
    """Return the shipped tokenizer with the control tokens and the template of a dialect."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
    if dialect.startswith("qwen"):
        tags = ["<think>", "</think>"] if dialect == "qwen3" else []
        tokenizer.add_tokens(tags)
    if dialect.startswith("llama"):
        extra = [f"<|{name}|>" for name in _LLAMA]
        tokenizer.add_special_tokens(
            {"bos_token": extra[0], "eos_token": "<|eot_id|>", "extra_special_tokens": extra}
        )
    tokenizer.chat_template = template or _TEMPLATES.get(dialect, tokenizer.chat_template)
    return tokenizer


def ends_of(tokenizer: Any) -> list[int]:
    """Return the ids of the stop tokens in the model's generation config."""
    names = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>")
    held = tokenizer.get_vocab()
    return [held[name] for name in (names[:3] if names[0] in held else names[3:])]
