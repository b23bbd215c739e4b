"""Conversion of text to tokens and back.

A text that continues another one is encoded as its continuation. Many tokenizers encode the start
of a text in another way than its middle: they put a blank before it, or drop the white space around
control tokens. So a text that continues other text is encoded together with the end of that text,
whose tokens are then cut off.
"""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

SEAM = "\ue000"
"""A character that is inserted into a text such as `<|im_end|>` in a message. It divides the text,
so that the tokenizer does not encode it as a control token. It is removed afterwards.
"""
LONG_REPLY_TOKENS = 4096
"""Number of tokens from which on `TextTokens.decode` takes 1 ms or more, so that it should run in a
thread.
"""
_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""Pattern of the tokens that stand for single bytes, in vocabularies that have them."""


class TextTokens:
    """A tokenizer without a chat template: the tokens of texts, and the texts of tokens."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        """Find the control tokens. `template` is the chat template that writes them."""
        self._tokenizer = tokenizer
        self._backend = _plain_backend(tokenizer)
        added = tokenizer.added_tokens_decoder
        self.control_tokens = {token: mark.content for token, mark in added.items()}
        """The texts of control tokens and tags, by token id."""
        texts = (
            each.content for each in added.values() if each.special or each.content in template
        )
        self.control_texts = sorted({tokenizer.eos_token, *texts})
        """The texts of all special tokens, and of added tokens that the template contains."""

    def encode(self, text: str, *, after: str = "", seam: str = "") -> tuple[int, ...]:
        """Return the tokens of a text that continues the text `after`.

        Control tokens in it are encoded as such, unless `seam` divides them. One half of a
        surrogate pair becomes `?`.
        """
        first, *parts = text.split(seam) if seam else [text]
        tokens = self._encode_after(self._context(after, seam), first)
        # a control token that is divided continues a text that was not cut at a token
        return sum((self._encode_after(SEAM, part) for part in parts), tokens)

    def _context(self, text: str, seam: str) -> str:
        """Return the last part of a text, on which the tokens of its continuation depend.

        It begins with the last control token, so no token crosses its beginning.
        """
        last = text.rpartition(seam)[2] if seam else text
        return last[max(0, *(last.rfind(mark) for mark in self.control_texts)) :]

    def _encode_after(self, context: str, text: str) -> tuple[int, ...]:
        """Return the tokens of `text` where it follows `context`.

        If a token would contain the end of `context` and the start of `text`, it is divided there:
        the tokens of the context are given and cannot change.
        """
        for before in (context, SEAM):
            start = self._own_tokens(before)
            tokens = self._own_tokens(before + text)
            if tokens[: len(start)] == start:
                return tokens[len(start) :]
        return self._own_tokens(text)

    def _own_tokens(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text by itself."""
        if not text:
            return ()
        whole = text.encode(errors="replace").decode()
        return tuple(self._tokenizer.encode(whole, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens.

        For many tokens, most work is done without the interpreter lock.
        """
        if self._backend is None:
            # transformers checks the type of each token of a list, which takes as long as decoding.
            options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            return str(self._tokenizer.decode(np.array(tokens, np.int64), **options))
        tokens = list(tokens)
        if len(tokens) < LONG_REPLY_TOKENS:
            return str(self._backend.decode(tokens, skip_special_tokens=False))
        # `decode` would hold the interpreter lock
        (text,) = self._backend.decode_batch([tokens], skip_special_tokens=False)
        return str(text)

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token's text. A token may be only a part of a character.

        A tokenizer that is not of the Rust library decodes the token by itself, without a context.
        """
        if token in self.control_tokens:
            return self.control_tokens[token].encode()
        steps = self._decoder_steps
        if not steps:
            return self.decode([token]).encode(errors="replace")
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        for step in steps:
            match step:
                case {"type": "ByteLevel"} if all(letter in _BYTE_OF for letter in piece):
                    return bytes(_BYTE_OF[letter] for letter in piece)
                case {"type": "ByteFallback"} if found := _BYTE.fullmatch(piece):
                    return bytes([int(found[1], 16)])
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    piece = piece.replace(old, new)
                case {"type": "Metaspace", "replacement": str(mark)}:
                    piece = piece.replace(mark, " ")
        return piece.encode(errors="replace")

    @cached_property
    def _decoder_steps(self) -> list[dict[str, Any]]:
        """The steps by which the Rust library turns tokens into text. Empty without it."""
        decoder = None if self._backend is None else self._backend.decoder
        if decoder is None:
            return []
        state = json.loads(decoder.__getstate__())
        return list(state.get("decoders", [state]))

    @cached_property
    def longest_token(self) -> int:
        """The length of the longest token of the vocabulary, in characters."""
        return max(map(len, self._tokenizer.get_vocab()))

    def are_token_ids(self, tokens: Sequence[int]) -> bool:
        """Return True if all `tokens` are in the vocabulary."""
        return 0 <= min(tokens) <= max(tokens) < len(self._tokenizer)


def text_offsets(tokens: Sequence[bytes]) -> Iterator[int]:
    """Yield for each token the character position in the text at which it begins.

    A token that continues a character has the position after it, as if the character were complete.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    place = 0
    for token in tokens:
        yield place
        place += len(decoder.decode(token))


def longest_seam(text: str) -> int:
    """Return the length of the longest run of `SEAM` in a text."""
    return max(map(len, re.findall(f"{SEAM}+", text)), default=0)


def _plain_backend(tokenizer: Any) -> Any:
    """Return the Rust tokenizer, if the tokenizer uses its `decode` unchanged.

    Otherwise, return None.
    """
    from transformers import PreTrainedTokenizerFast

    own = getattr(type(tokenizer), "_decode", None)
    return tokenizer.backend_tokenizer if own is PreTrainedTokenizerFast._decode else None


def _byte_letters() -> dict[str, int]:
    """Return the byte for which each letter stands in a byte-level vocabulary, such as GPT-2's.

    Printable bytes of Latin-1 stand for themselves. The others have the letters from 256 on.
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [each for each in range(256) if each not in shown]
    letters = {chr(each): each for each in shown}
    return letters | {chr(256 + place): each for place, each in enumerate(hidden)}


_BYTE_OF = _byte_letters()
