"""Show conversations as HTML: speakers, tool calls, and the version that sampled each token."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from unstale.observe.report.gather import Chosen, succeeded
from unstale.observe.report.markup import render
from unstale.observe.report.words import number

MAX_TEXT = 6_000
"""Number of characters shown of one turn."""
MAX_TURNS = 80

_SPEAKER = re.compile(r"<\|im_start\|>([a-z]{1,12})\n?")
_END = re.compile(r"<\|im_end\|>\n?")
_PARTS = re.compile(
    r"(<tool_call>.*?(?:</tool_call>|$)|<think>.*?(?:</think>|$)|<\|[a-z_]{1,20}\|>)", re.DOTALL
)
_RESPONSE = re.compile(r"\s*</?tool_response>\s*")
_ROLES = {"system": "system", "user": "user", "assistant": "agent", "tool": "tool"}


@dataclass(frozen=True, slots=True)
class Utterance:
    """A text sampled by one version, or a text that no policy sampled (`version` is None)."""

    text: str
    version: int | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TurnText:
    """The text of one turn of a conversation, and its speaker."""

    role: str
    utterances: tuple[Utterance, ...]

    @property
    def text(self) -> str:
        return "".join(utterance.text for utterance in self.utterances)

    @property
    def speaker(self) -> str:
        return _ROLES.get(self.role, self.role or "environment")

    @property
    def kind(self) -> str:
        return self.role if self.role in _ROLES else "tool"

    @property
    def summary(self) -> str:
        """Return the first words of a long system prompt, which is folded.

        Empty for other turns.
        """
        folded = self.role == "system" and len(self.text) > 300
        return f"{self.text[:120].strip()} …" if folded else ""


def conversation(chosen: Chosen, *, opened: bool) -> Markup:
    """Return one conversation as HTML. It is folded unless `opened` is True."""
    record = chosen.record
    turns = list(_turns(record.get("turns")))
    versions = sorted(
        {part.version for turn in turns for part in turn.utterances if part.version is not None}
    )
    facts = [
        f"step {record.get('step', '?')}",
        str(record.get("task", "task unknown")),
        f"reward {record.get('reward', '?')}",
        f"{record.get('num_tokens', '?')} tokens",
        f"ended by {record.get('stop', '?')}",
    ]
    return render(
        "conversation.html",
        why=chosen.why.capitalize(),
        won=succeeded(record),
        facts=facts,
        opened=opened,
        colours={version: f"version-{i % 6}" for i, version in enumerate(versions)},
        turns=turns[:MAX_TURNS],
        num_more=max(0, len(turns) - MAX_TURNS),
        passages=_passages,
        max_text=MAX_TEXT,
    )


def _turns(turns: Any) -> Iterator[TurnText]:
    """Yield the turns of a recorded episode.

    The journal stores the text between two replies as one turn. It is divided by speaker here.
    """
    if not isinstance(turns, list):
        return
    for turn in turns:
        if not isinstance(turn, Mapping):
            continue
        role = str(turn.get("role", ""))
        utterances = tuple(_utterances(turn))
        if role == "assistant":
            yield TurnText(role, utterances)
        else:
            yield from _split_by_speaker(role, "".join(part.text for part in utterances))


def _utterances(turn: Mapping[str, Any]) -> Iterator[Utterance]:
    pieces = turn.get("pieces")
    if not isinstance(pieces, list) or not pieces:
        yield Utterance(str(turn.get("text", "")), None, 0)
        return
    for piece in pieces:
        if isinstance(piece, Mapping):
            version = number(piece.get("version"))
            sampled = None if version is None or version < 0 else int(version)
            yield Utterance(
                str(piece.get("text", "")), sampled, int(number(piece.get("num_tokens")) or 0)
            )


def _split_by_speaker(role: str, text: str) -> Iterator[TurnText]:
    """Yield one turn per speaker of a text in the ChatML format. Empty turns are left out."""
    marks = _SPEAKER.split(text)
    for speaker, words in [(role, marks[0]), *zip(marks[1::2], marks[2::2], strict=True)]:
        words = _END.sub("", words)
        if "<tool_response>" in words:
            speaker, words = "tool", _RESPONSE.sub("\n", words)
        if words.strip():
            yield TurnText(speaker, (Utterance(words.strip("\n"), None, 0),))


@dataclass(frozen=True, slots=True)
class Passage:
    """A text, cut where a tool call, a reasoning text or a special token begins or ends."""

    utterance: Utterance
    cuts: list[tuple[str, str]]
    """Each part of the text with its CSS class."""
    before: int | None
    """The version that sampled the text before this, if new weights interrupted the reply here."""


def _passages(turn: TurnText) -> Iterator[Passage]:
    text = turn.text
    kinds: list[tuple[int, str]] = []
    for match in _PARTS.finditer(text[:MAX_TEXT]):
        kinds += _kinds(match.group(), match.start())
    start = 0
    previous: int | None = None
    for utterance in turn.utterances:
        end = min(start + len(utterance.text), MAX_TEXT)
        ends = [start, *(at for at, _ in kinds if start < at < end), end]
        cuts = [(text[a:b], _at(kinds, a)) for a, b in pairwise(ends) if a < b]
        replaced = utterance.version is not None and previous not in (None, utterance.version)
        yield Passage(utterance, cuts, previous if replaced else None)
        start = end
        previous = previous if utterance.version is None else utterance.version


def _kinds(text: str, start: int) -> list[tuple[int, str]]:
    """Return `(position, kind)` where calls, reasoning texts and special tokens begin or end."""
    end = start + len(text)
    for tag, kind in (("tool_call", "call"), ("think", "think")):
        if text.startswith(f"<{tag}>"):
            inner = end - len(f"</{tag}>") if text.endswith(f"</{tag}>") else end
            return [
                (start, "special"),
                (start + len(f"<{tag}>"), kind),
                (inner, "special"),
                (end, ""),
            ]
    return [(start, "special"), (end, "")]


def _at(kinds: Sequence[tuple[int, str]], position: int) -> str:
    kind = ""
    for start, name in kinds:
        if start <= position:
            kind = name
    return kind
