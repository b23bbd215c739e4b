"""The base policy's tokenizer: byte-level BPE with one token per number and name of level 1."""

from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

PIECES = "|".join(
    (
        # The fixed text of a call is one token per piece, so that calls are short.
        r"\n\{\"name\": \"",
        r"\", \"arguments\": \{\"[a-z_]+\":(?: \")?",
        r", \"[a-z_]+\":(?: \")?",
        r"\"?\}\}\n",
        r"(?:system|user|assistant)\n",
        r" ?[A-Za-z_]+",
        r" ?\d{1,2}",
        r" ?[^\sA-Za-z_\d]+",
        r"\s+",
    )
)
"""The pieces of text before merging. A number has at most two digits, so it is one token."""

TEMPLATE = """\
{%- macro calls(message) %}
{%- for call in message.tool_calls %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}
{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content }}
{%- if tools %}
{{- '\\nTools:' }}
{%- for tool in tools %}{{- ' ' + tool.function.name }}{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
{{- message.content }}
{%- if message.tool_calls %}{{- calls(message) }}{%- endif %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}\
{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Qwen's chat template, with only the names of tools: a small model cannot read schemas."""


def make_tokenizer(corpus: Iterable[str], vocab_size: int) -> Any:
    """Train the tokenizer; equal text gives an equal tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=list(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
