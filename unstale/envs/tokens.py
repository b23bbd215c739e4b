"""Convert text to tokens and back.

Many tokenizers encode the start of a text differently from its middle: they put a blank before it,
or drop white space around control tokens. So a text that continues another one is encoded together
with the end of that text, whose tokens are then cut off.
"""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

SEAM = "\ue000"
"""A character that is inserted into a text in a message such as `<|im_end|>`, so that the tokenizer
does not encode it as a control token. It is left out when the text is encoded.
"""
LONG_REPLY_TOKENS = 4096
"""Number of tokens from which `TextTokens.decode` takes 1 ms or more and should run in a thread."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""Pattern of tokens that stand for single bytes, in vocabularies with such tokens."""


class TextTokens:
    """A converter of texts to tokens and back, without a chat template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        """Find the control tokens of a tokenizer, including those that the chat template writes."""
        self._tokenizer = tokenizer
        self._backend = _plain_backend(tokenizer)
        added = tokenizer.added_tokens_decoder
        self.control_tokens = {token: mark.content for token, mark in added.items()}
        """Id of a control token or tag -> its text."""
        texts = (
            each.content for each in added.values() if each.special or each.content in template
        )
        self.control_texts = sorted({tokenizer.eos_token, *texts})
        """Sorted texts of all special tokens, and of added tokens that the chat template
        contains.
        """

    def encode(self, text: str, *, after: str = "", seam: str = "") -> tuple[int, ...]:
        """Return the tokens that a text has after the text `after`.

        Control tokens in the text are encoded as such unless `seam` is inside of them. Half of a
        surrogate pair becomes `?`.
        """
        first, *parts = text.split(seam) if seam else [text]
        tokens = self._encode_after(self._context(after, seam), first)
        # a control token that is divided continues a text that was not cut at a token
        return sum((self._encode_after(SEAM, part) for part in parts), tokens)

    def _context(self, text: str, seam: str) -> str:
        """Return the end of a text, from its last control token on.

        The tokens of a continuation depend on this part only, because no token crosses its start.
        """
        last = text.rpartition(seam)[2] if seam else text
        return last[max(0, *(last.rfind(mark) for mark in self.control_texts)) :]

    def _encode_after(self, context: str, text: str) -> tuple[int, ...]:
        """Return the tokens that `text` has after `context`.

        If a token would cross the border between both, it is divided there, because the tokens of
        the context are fixed.
        """
        for before in (context, SEAM):
            start = self._own_tokens(before)
            tokens = self._own_tokens(before + text)
            if tokens[: len(start)] == start:
                return tokens[len(start) :]
        return self._own_tokens(text)

    def _own_tokens(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        whole = text.encode(errors="replace").decode()
        return tuple(self._tokenizer.encode(whole, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens. Many are decoded mostly without the interpreter lock."""
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
        """Return the UTF-8 bytes of a token, which may be part of a character.

        A tokenizer that is not from the Rust library decodes the token without context.
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
        """Steps by which the Rust library turns tokens into text. Empty for other tokenizers."""
        decoder = None if self._backend is None else self._backend.decoder
        if decoder is None:
            return []
        state = json.loads(decoder.__getstate__())
        return list(state.get("decoders", [state]))

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token in the vocabulary."""
        return max(map(len, self._tokenizer.get_vocab()))

    def are_token_ids(self, tokens: Sequence[int]) -> bool:
        """Return True if all these ids are in the vocabulary."""
        return 0 <= min(tokens) <= max(tokens) < len(self._tokenizer)


def text_offsets(tokens: Sequence[bytes]) -> Iterator[int]:
    """Yield for each token the index in the text of the character in which it begins.

    Tokens that are parts of one character have the same index.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    place = 0
    for token in tokens:
        yield place
        place += len(decoder.decode(token))


def longest_seam(text: str) -> int:
    """Return the length of the longest run of the character `SEAM` in a text."""
    return max(map(len, re.findall(f"{SEAM}+", text)), default=0)


def _plain_backend(tokenizer: Any) -> Any:
    """Return the Rust tokenizer whose `decode` this tokenizer uses unchanged. None if it does
    not.
    """
    from transformers import PreTrainedTokenizerFast

    own = getattr(type(tokenizer), "_decode", None)
    return tokenizer.backend_tokenizer if own is PreTrainedTokenizerFast._decode else None


def _byte_letters() -> dict[str, int]:
    """Return letter -> byte that it stands for in a byte-level vocabulary, such as GPT-2's.

    Printable bytes of Latin-1 stand for themselves. The others have the letters from 256 on.
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [each for each in range(256) if each not in shown]
    letters = {chr(each): each for each in shown}
    return letters | {chr(256 + place): each for place, each in enumerate(hidden)}


_BYTE_OF = _byte_letters()
