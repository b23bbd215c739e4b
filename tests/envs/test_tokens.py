"""Test that text is encoded as the continuation of the text before it.

Tokenizers of the SentencePiece kind put a blank before the start of a text, and control tokens may
take up the white space beside them. In a conversation that grows there is neither: its tokens are
those that the tokenizer gives for the whole.
"""

import json
from functools import cache
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.support.templates import tokenizer_of
from unstale.cli.template_checks import run_checks
from unstale.envs import Message, ToolCall
from unstale.envs.chat import Chat
from unstale.envs.references import encode_conversation
from unstale.envs.tokens import TextTokens, text_offsets
from unstale.rollout.endpoint.conversation import Call, Conversation

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CONTROL = ["<unk>", "<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"]
TALK = [
    Message("user", "how are you"),
    Message("assistant", "hello world"),
    Message("user", "the result"),
    Message("assistant", "", (ToolCall("f", {"a": "hello "}),)),
    Message("tool", " 5"),
    Message("assistant", "5 "),
    Message("user", "a user"),
]
METASPACE = ("first", "always", "never")
KINDS = (*METASPACE, "prepended", "unigram", "bytes")


@cache
def _trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary with a token for each byte, and its merges."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    letters = [chr(code) for code in range(32, 127)]
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False, initial_alphabet=letters)
    texts = ["hello world how are you today", "the result is 5", "a user asks a tool"] * 50
    tokenizer.train_from_iterator(texts, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    names = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), "\n", *trained["vocab"]]
    vocab = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return vocab, [tuple(pair) for pair in trained["merges"]]


def sentencepiece(kind: str, *, template: str = TEMPLATE, **strip: bool) -> Any:
    """Return a tokenizer. `strip` are options of its control tokens (`lstrip`, `rstrip`)."""
    vocab, merges = _trained()
    if kind == "bytes":
        tokenizer = tokenizer_of("shipped")
        tokenizer.add_special_tokens({"eos_token": "<|end|>", "extra_special_tokens": CONTROL[3:]})
        tokenizer.chat_template = template
        return tokenizer
    if kind == "unigram":
        scored = [(name, -float(place % 7 + 1) / len(name)) for name, place in vocab.items()]
        model: Any = models.Unigram(scored, unk_id=0, byte_fallback=True)
    else:
        model = models.BPE(
            vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    backend = Tokenizer(model)
    if kind == "prepended":  # as in files of Llama 2
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    else:
        scheme = kind if kind in METASPACE else "first"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(  # type: ignore[assignment]
            prepend_scheme=scheme, split=False
        )
    backend.decoder = decoders.Sequence(  # type: ignore[assignment]
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(
        [AddedToken(each, special=True, normalized=False, **strip) for each in CONTROL]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", unk_token="<unk>", bos_token="<s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def own_tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("strip", [{}, {"rstrip": True}, {"lstrip": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_grown_conversation_has_the_tokenizers_own_tokens(
    kind: str, strip: dict[str, bool]
) -> None:
    tokenizer = sentencepiece(kind, **strip)
    chat = Chat(tokenizer, [])
    grown = list(chat.encode_prompt(TALK[:1]))
    for place in (1, 3, 5):
        grown += chat.encode_reply(TALK[place], TALK[place + 1 : place + 2])
        calls = TALK[place].tool_calls
        grown += chat.encode_continuation(TALK[place + 1 : place + 2], ended=True, calls=calls)
    assert tuple(grown) == own_tokens(tokenizer, chat.render(TALK))
    learnt = encode_conversation(chat, TALK[:-1]).tokens
    assert learnt == tuple(grown[: len(learnt)])
    # if an empty reply ends with a token that takes up the blank line of the prompt, both differ
    takes_up = kind != "bytes" and strip.get("lstrip")
    broken = [each.name for each in run_checks(chat, 12) if each.broken]
    assert broken[:1] == ["has the tokenizer's own tokens"] * bool(takes_up)


def test_replies_and_continuations_begin_without_a_blank() -> None:
    tokenizer = sentencepiece("first")
    chat = Chat(tokenizer, [])
    names = tokenizer.convert_ids_to_tokens(chat.encode_reply(TALK[1]))
    assert names == ["he", "llo", "▁world", "<|end|>"]
    names = tokenizer.convert_ids_to_tokens(chat.encode_continuation(TALK[2:3], ended=True))
    assert names[:3] == ["\n", "<|user|>", "\n"]


def test_a_quoted_control_token_continues_the_text_before_it() -> None:
    for kind in ("first", "prepended"):
        tokenizer = sentencepiece(kind)
        chat = Chat(tokenizer, [])
        tokens = chat.encode_prompt([Message("user", "say <|end|> or x<|end|>")])
        names = tokenizer.convert_ids_to_tokens(tokens)
        assert names.count("<|end|>") == 1
        assert "".join(names).replace("▁", " ").count("say <|end|> or x<|end|><|end|>") == 1


def test_a_continued_text_is_encoded_after_the_answer() -> None:
    tokenizer = sentencepiece("first")
    chat = Chat(tokenizer, [])
    conversation = Conversation(chat)
    asked = conversation.ask(Call("hello"))
    asked.branch.pieces.extend(asked.context)
    asked.branch.exchanges[-1].start = len(asked.branch.pieces)
    conversation.add_answer(asked.branch, " world<|end|>", ended=True)
    more = conversation.ask(Call("hello world<|end|>hello"))
    assert not more.fork
    assert tokenizer.convert_ids_to_tokens(more.context[0].tokens) == ["he", "llo"]


BLANK = TEMPLATE.replace("<|{{ m.role }}|>\n", "<|{{ m.role }}|> ").replace(
    "<|assistant|>\n", "<|assistant|> "
)


def test_a_prompt_whose_last_token_takes_up_the_reply_is_caught() -> None:
    """The tokenizer writes blank and first word of a reply as one token, but the prompt has the
    blank."""
    assert BLANK != TEMPLATE
    chat = Chat(sentencepiece("bytes", template=BLANK), [])
    broken, *_ = [each for each in run_checks(chat, 20) if each.broken]
    ((problem, messages),) = broken.problems.values()
    assert broken.name == "has the tokenizer's own tokens" and len(messages) == 3
    assert "the tokenizer's own are" in problem.excerpt
    # a run can still train: the reply begins after the tokens that the prompt has
    reply = Message("assistant", "hello")
    whole = chat.encode_prompt([Message("user", "?")]) + chat.encode_reply(reply)
    assert chat.text(whole, whole=True).endswith("<|assistant|> hello<|end|>")


def test_a_chat_that_encodes_out_of_context_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = TextTokens.encode

    def alone(self: TextTokens, text: str, *, after: str = "", seam: str = "") -> tuple[int, ...]:
        return encode(self, text, seam=seam)

    monkeypatch.setattr(TextTokens, "encode", alone)
    for kind, strip in (("first", {}), ("always", {"rstrip": True})):
        (broken,) = [
            each for each in run_checks(Chat(sentencepiece(kind, **strip), []), 12) if each.broken
        ]
        assert broken.name == "has the tokenizer's own tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str) -> None:
    text = "naïve 🧑‍🚀 日本 hello world<|end|>"
    tokenizer = sentencepiece(kind)
    chat = Chat(tokenizer, [])
    tokens = chat.encode(text)
    parts = [chat.bytes_of(token) for token in tokens]
    assert b"".join(parts).lstrip() == text.encode()
    assert parts[-1] == b"<|end|>" and any(len(part) == 1 and part > b"\x7f" for part in parts)


def test_offsets_count_characters_and_not_their_parts() -> None:
    assert list(text_offsets([b"a", b"\xf0\x9f", b"\x98\x80", b"b"])) == [0, 1, 1, 2]
