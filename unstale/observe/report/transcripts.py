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
"""Characters of one turn that are shown."""
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
    """A run of text of one origin. `version` is None for text that no policy sampled."""

    text: str
    version: int | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TurnText:
    role: str
    said: tuple[Utterance, ...]


def conversation(chosen: Chosen, *, opened: bool) -> Markup:
    """Render one conversation, folded unless `opened`."""
    record = chosen.record
    turns = list(_turns(record.get("turns")))
    order = sorted(
        {said.version for turn in turns for said in turn.said if said.version is not None}
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
        role, said = str(turn.get("role", "")), tuple(_said(turn))
        if role == "assistant":
            yield TurnText(role, said)
        else:
            yield from _parted(role, "".join(part.text for part in said))


def _said(turn: Mapping[str, Any]) -> Iterator[Utterance]:
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


def _parted(role: str, text: str) -> Iterator[TurnText]:
    """Split ChatML text by speaker. The empty opening of a reply is left out."""
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
    text = "".join(said.text for said in turn.said)
    if turn.role == "system" and len(text) > 300:
        body = el("details", el("summary", f"{text[:120].strip()} …"), body)
    return el(
        "div", el("div", name, class_="who"), el("div", body, class_="words"), class_=f"turn {kind}"
    )


def _body(turn: TurnText, order: Sequence[int]) -> Markup:
    """Render a turn's text, split where the version changes or a call begins or ends."""
    text = "".join(said.text for said in turn.said)
    kinds: list[tuple[int, str]] = []
    for match in _PARTS.finditer(text[:MAX_TEXT]):
        kinds += _kinds(match.group(), match.start())
    parts: list[Markup] = []
    start, before = 0, None
    for said in turn.said:
        end = min(start + len(said.text), MAX_TEXT)
        changed = before is not None and said.version is not None and said.version != before
        if changed:
            parts.append(_interruption(before, said.version))
        cuts = [start, *(at for at, _ in kinds if start < at < end), end]
        runs = [_run(text[a:b], _at(kinds, a)) for a, b in pairwise(cuts) if a < b]
        if said.version is None:
            parts += runs
        else:
            about = f"version {said.version}, {said.num_tokens} tokens"
            colour = _colour(said.version, order)
            parts.append(el("span", runs, class_=f"run {colour}", title=about, data_tip=about))
        start, before = end, said.version if said.version is not None else before
    if len(text) > MAX_TEXT:
        parts.append(el("span", f" … {len(text) - MAX_TEXT:,} more characters", class_="quiet"))
    return join(parts)


def _interruption(before: int | None, after: int | None) -> Markup:
    told = f"Generation was interrupted here: new weights arrived, and version {after} went on where {before} had stopped"
    return el("span", f"v{before} → v{after}", class_="interruption", title=told, data_tip=told)


def _kinds(text: str, start: int) -> list[tuple[int, str]]:
    """Return where each kind of text begins, by the tags of the policy."""
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


def _at(kinds: Sequence[tuple[int, str]], place: int) -> str:
    kind = ""
    for at, name in kinds:
        if at <= place:
            kind = name
    return kind


def _run(text: str, kind: str) -> Markup:
    return el("span", text, class_=kind) if kind else join(text)


def _colour(version: int, order: Sequence[int]) -> str:
    return f"version-{order.index(version) % 6}"
