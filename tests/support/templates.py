"""Tokenizers with chat templates like those of Qwen, Llama, Mistral and GLM.

The templates are rewritten for these tests. Their turns, tags, tool calls, thoughts and dates are
those of the originals; default system messages and instructions on tools are worded differently.
Mistral v3 has tools and system message at the start: the original moves them to the last question.
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

_JSON_CALL = r"""{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}{%- endfor %}"""
_TAGGED_CALL = r"""{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}
{%- set as_json = value is mapping or (value is sequence and value is not string) %}
{{- '<parameter=' + key + '>\n' + (value | tojson if as_json else value | string) }}
{{- '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}"""

QWEN3_CODER = QWEN25.replace(_JSON_CALL, _TAGGED_CALL)
"""A template in whose calls each argument has its own tag. Booleans and None are Python's words."""

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

_LLAMA_CALL = r"""{{- head('assistant') + '{"name": "' + call.name }}
{{- '", "parameters": ' + (call.arguments | tojson) + '}' }}"""

LLAMA_FUNCTION = LLAMA31.replace(
    _LLAMA_CALL,
    r"""{{- head('assistant') + '<function=' + call.name + '>' }}
{{- (call.arguments | tojson) + '</function>' }}""",
)
"""The format that Llama 3.1's documentation gives for custom tools."""

LLAMA_PYTHONIC = LLAMA31.replace(
    "{%- if message.tool_calls | length > 1 %}{{- raise_exception('one call at a time') }}"
    "{%- endif %}",
    "",
).replace(
    "{%- set call = message.tool_calls[0].function %}\n" + _LLAMA_CALL,
    r"""{{- head('assistant') + '[' }}
{%- for call in message.tool_calls %}{{- call.function.name + '(' }}
{%- for key, value in call.function.arguments | items %}
{{- key + '=' + (value | tojson) + (', ' if not loop.last else '') }}{%- endfor %}
{{- ')' + (', ' if not loop.last else '') }}{%- endfor %}{{- ']' }}""",
)

MISTRAL = r"""{{- bos_token }}
{%- if messages[0].role == 'system' %}
{{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}{{- eos_token }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}"""

MISTRAL_IDS = MISTRAL.replace("'[ARGS]'", "'[CALL_ID]' + call.id + '[ARGS]'").replace(
    "'[TOOL_RESULTS]'", "'[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]'"
)

MISTRAL_V3 = r"""{%- macro id(text) %}
{%- if text | length != 9 %}{{- raise_exception('an id has 9 characters') }}{%- endif %}
{{- '"' + text + '"}' }}{%- endmacro %}
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST] ' }}
{{- messages[0].content + '\n\n' if loop.index0 == 1 and messages[0].role == 'system' else '' }}
{{- message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{{- (call.function | tojson)[:-1] + ', "id": ' + id(call.id) + (', ' if not loop.last else '') }}
{%- endfor %}{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) }}
{{- ', "call_id": ' + id(message.tool_call_id) + '[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}"""

GLM = r"""{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\n# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '\n</tools>' }}{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- '<|assistant|>\n<think>' }}
{{- (message.reasoning_content or '') | trim if loop.index0 > last.user else '' }}
{{- '</think>' + ('\n' + message.content | trim if message.content | trim else '') }}
{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}
{{- (value if value is string else value | tojson) + '</arg_value>\n' }}{%- endfor %}
{{- '</tool_call>' }}{%- endfor %}
{%- elif message.role == 'tool' %}
{{- '<|observation|>' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- else %}{{- '<|' + message.role + '|>\n' + message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{{- '\n<think></think>' if enable_thinking is defined and not enable_thinking }}{%- endif %}"""
"""A template in which no special token ends a reply. It ends with the header of the next turn."""

_LLAMA = (
    "begin_of_text",
    "end_of_text",
    "start_header_id",
    "end_header_id",
    "eom_id",
    "eot_id",
    "python_tag",
)
_MISTRAL = (
    "<s>",
    "</s>",
    *(f"[{word}]" for word in ("INST", "/INST", "TOOL_CALLS", "ARGS", "CALL_ID", "TOOL_CONTENT")),
    *(f"[{slash}{word}]" for word in ("AVAILABLE_TOOLS", "TOOL_RESULTS") for slash in ("", "/")),
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
)
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>")
_GLM += tuple(f"<|{role}|>" for role in ("system", "user", "assistant", "observation"))
_TEMPLATES = {
    "qwen3": QWEN3,
    "qwen2.5": QWEN25,
    "llama3": LLAMA3,
    "llama3.1": LLAMA31,
    "llama3.2": LLAMA32,
    "qwen3-coder": QWEN3_CODER,
    "llama-function": LLAMA_FUNCTION,
    "llama-pythonic": LLAMA_PYTHONIC,
    "mistral": MISTRAL,
    "mistral-ids": MISTRAL_IDS,
    "mistral-v3": MISTRAL_V3,
    "glm": GLM,
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
    if dialect.startswith("mistral"):
        tokenizer.add_special_tokens(
            {"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": [*_MISTRAL]}
        )
    if dialect == "glm":
        tokenizer.add_special_tokens(
            {"eos_token": "<|endoftext|>", "extra_special_tokens": [*_GLM]}
        )
        tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template or _TEMPLATES.get(dialect, tokenizer.chat_template)
    return tokenizer


def ends_of(tokenizer: Any) -> list[int]:
    """Return the ids of the stop tokens in the model's generation config."""
    held = tokenizer.get_vocab()
    for names in (
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        ("<|user|>", "<|observation|>", "<|endoftext|>"),
        ("</s>",),
        ("<|im_end|>", "<|endoftext|>"),
    ):
        if names[0] in held:
            return [held[name] for name in names]
    return []
