"""Render conversations as HTML, with speakers, calls and sampling versions."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from unstale.observe.report.gather import Chosen, succeeded
from unstale.observe.report.markup import Markup, el, join
from unstale.observe.report.words import number

MAX_TEXT = 6_000
"""Characters shown of one turn."""
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
    """A text from one source. `version` is None for text that no policy sampled."""

    text: str
    version: int | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TurnText:
    role: str
    utterances: tuple[Utterance, ...]


def conversation(chosen: Chosen, *, opened: bool) -> Markup:
    """Render one conversation, folded unless `opened`."""
    record = chosen.record
    turns = list(_turns(record.get("turns")))
    order = sorted(
        {
            utterance.version
            for turn in turns
            for utterance in turn.utterances
            if utterance.version is not None
        }
    )
    won = succeeded(record)
    facts = [
        f"step {record.get('step', '?')}",
        str(record.get("task", "task unknown")),
        f"reward {record.get('reward', '?')}",
        f"{record.get('num_tokens', '?')} tokens",
        f"ended by {record.get('stop', '?')}",
    ]
    keys = [el("span", f"version {version}", class_=_colour(version, order)) for version in order]
    head = el(
        "summary",
        el("b", chosen.why.capitalize(), class_="won" if won else "lost"),
        el("span", " · ".join(facts), class_="quiet"),
    )
    shown = [_turn(turn, order) for turn in turns[:MAX_TURNS]]
    if len(turns) > MAX_TURNS:
        shown.append(
            el(
                "p",
                f"{len(turns) - MAX_TURNS} more turns: unstale export-trajectories --content text",
                class_="quiet",
            )
        )
    if not shown:
        shown.append(el("p", "This record holds no turns.", class_="gap"))
    sampled_by = el("p", "Sampled by ", keys, class_="versions") if keys else None
    return el(
        "details",
        head,
        sampled_by,
        el("div", shown, class_="chat"),
        class_="conversation",
        open=opened,
    )


def _turns(turns: Any) -> Iterator[TurnText]:
    """Return the turns. Template text between two replies is split by speaker."""
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
    """Split ChatML text by speaker. Empty turns are left out."""
    marks = _SPEAKER.split(text)
    for speaker, words in [(role, marks[0]), *zip(marks[1::2], marks[2::2], strict=True)]:
        words = _END.sub("", words)
        if "<tool_response>" in words:
            speaker, words = "tool", _RESPONSE.sub("\n", words)
        if words.strip():
            yield TurnText(speaker, (Utterance(words.strip("\n"), None, 0),))


def _turn(turn: TurnText, order: Sequence[int]) -> Markup:
    name = _ROLES.get(turn.role, turn.role or "environment")
    kind = turn.role if turn.role in _ROLES else "tool"
    body = _body(turn, order)
    text = "".join(utterance.text for utterance in turn.utterances)
    if turn.role == "system" and len(text) > 300:
        body = el("details", el("summary", f"{text[:120].strip()} …"), body)
    return el(
        "div", el("div", name, class_="who"), el("div", body, class_="words"), class_=f"turn {kind}"
    )


def _body(turn: TurnText, order: Sequence[int]) -> Markup:
    """Render a turn's text, split where the version changes or a call begins or ends."""
    text = "".join(utterance.text for utterance in turn.utterances)
    kinds: list[tuple[int, str]] = []
    for match in _PARTS.finditer(text[:MAX_TEXT]):
        kinds += _kinds(match.group(), match.start())
    parts: list[Markup] = []
    start = 0
    previous: int | None = None
    for utterance in turn.utterances:
        version = utterance.version
        end = min(start + len(utterance.text), MAX_TEXT)
        if previous is not None and version is not None and version != previous:
            parts.append(_interruption(previous, version))
        cuts = [start, *(at for at, _ in kinds if start < at < end), end]
        runs = [_run(text[a:b], _at(kinds, a)) for a, b in pairwise(cuts) if a < b]
        start = end
        if version is None:
            parts += runs
            continue
        about = f"version {version}, {utterance.num_tokens} tokens"
        colour = _colour(version, order)
        parts.append(el("span", runs, class_=f"run {colour}", title=about, data_tip=about))
        previous = version
    if len(text) > MAX_TEXT:
        parts.append(el("span", f" … {len(text) - MAX_TEXT:,} more characters", class_="quiet"))
    return join(parts)


def _interruption(before: int, after: int) -> Markup:
    text = "Generation was interrupted here by new weights: "
    text += f"version {after} continued after version {before}"
    return el("span", f"v{before} → v{after}", class_="interruption", title=text, data_tip=text)


def _kinds(text: str, start: int) -> list[tuple[int, str]]:
    """Return `(position, kind)` where calls, thoughts and special tokens begin or end."""
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


def _run(text: str, kind: str) -> Markup:
    return el("span", text, class_=kind) if kind else join(text)


def _colour(version: int, order: Sequence[int]) -> str:
    return f"version-{order.index(version) % 6}"
