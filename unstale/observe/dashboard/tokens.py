"""Read one episode or one group of a journal, token by token."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from unstale.durability.journal import Journal, JournalError, JournalReader
from unstale.durability.journal.conversations import Decode, load_decoder
from unstale.durability.run_folder import Row
from unstale.observe.dashboard import limits
from unstale.observe.dashboard.database import COLUMNS
from unstale.observe.dashboard.index import RunIndex, unreadable
from unstale.observe.dashboard.table import BadQuestion, as_row
from unstale.observe.dashboard.training import cut, of_episode
from unstale.records import Sampled, walk

MAX_TOKENS = 8000
"""Tokens of an episode in one answer. Longer ones are read in parts."""

MAX_SIBLING_TOKENS = 3000
MAX_SIBLINGS = 32

MARK = "<|im_start|>"
"""Text of the token that begins a message in the ChatML format."""

JOINED = 8
"""Tokens that are decoded together at most, because a character may have several."""


class UnknownEpisode(LookupError):
    """Error: the run has no such episode or group."""


class NotYet(RuntimeError):
    """Error: the index is being filled and does not have the episode yet."""


def episode(
    index: RunIndex,
    number: int,
    start: int = 0,
    limit: int = MAX_TOKENS,
    step: int | None = None,
) -> Row:
    """Return an episode: its row of the table, and `limit` tokens from the token `start` on.

    Trained tokens have the values of `step`, or of the first step that trained on them, with the
    limits of the run (`limits.of_training`).

    Raises `UnknownEpisode`, `NotYet`, `JournalError` if the journal is damaged, and `BadQuestion`.
    """
    if start < 0 or not 1 <= limit <= MAX_TOKENS:
        raise BadQuestion(f"start must be >= 0 and limit between 1 and {MAX_TOKENS}")
    row = _row(index, number)
    with _open(index) as journal:
        return row | _tokens(
            journal,
            row,
            _decoder(index),
            start=start,
            limit=limit,
            step=step,
            explain=partial(limits.of_training, index.folder),
        )


def group(index: RunIndex, number: int) -> Row:
    """Return the episodes of a group, and where each departs from the first of them.

    `common_tokens` is the number of tokens at the beginning that all siblings share, and
    `first_difference` of an episode the number that it shares with the first one.
    """
    rows = index.database.rows(
        "SELECT episode FROM episodes WHERE group_number = ? ORDER BY sibling, episode LIMIT ?",
        (number, MAX_SIBLINGS),
    )
    if not rows:
        raise _missing(index, f"group {number}")
    ((total,),) = index.database.rows(
        "SELECT count(*) FROM episodes WHERE group_number = ?", (number,)
    )
    decode = _decoder(index)
    members: list[Row] = []
    with _open(index) as journal:
        for (each,) in rows:
            row = _row(index, each)
            try:
                row |= _tokens(journal, row, decode, start=0, limit=MAX_SIBLING_TOKENS)
            except JournalError as error:
                row["problem"] = str(error)
            members.append(row)
    streams = [_stream(member) for member in members]
    for member, stream in zip(members, streams, strict=True):
        member["first_difference"] = common_prefix([streams[0], stream])
    ended = [stream for member, stream in zip(members, streams, strict=True) if stream]
    return {
        "group_number": number,
        "task": members[0].get("task"),
        "num_episodes": total,
        "common_tokens": common_prefix(ended),
        "members": members,
    }


def common_prefix(streams: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens at the beginning that all streams share.

    >>> common_prefix([[1, 2, 3], [1, 2, 4], [1, 2]])
    2
    """
    pairs = zip(*streams, strict=False)
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, pairs))


def _stream(member: Row) -> list[int]:
    return [token for piece in member.get("pieces", ()) for token in piece["ids"]]


def _open(index: RunIndex) -> JournalReader:
    if problem := unreadable(index.folder):
        raise UnknownEpisode(problem)
    return Journal.read(index.folder)


def _decoder(index: RunIndex) -> Decode | None:
    try:
        return load_decoder(index.folder)
    except (OSError, ValueError):
        return None


def _row(index: RunIndex, number: int) -> Row:
    names = [column.name for column in COLUMNS]
    rows = index.database.rows(
        f"SELECT {', '.join(names)}, is_branch, note FROM episodes WHERE episode = ?", (number,)
    )
    if not rows:
        raise _missing(index, f"episode {number}")
    figures = index.database.rows(
        "SELECT name, value FROM figures WHERE episode = ? ORDER BY name", (number,)
    )
    return as_row(rows[0], names) | {"figures": dict(figures)}


def _missing(index: RunIndex, what: str) -> UnknownEpisode | NotYet:
    if index.is_complete:
        return UnknownEpisode(f"the run has no {what}")
    count = f"{index.num_ended} of {index.num_started}"
    return NotYet(f"{what} is not read yet: {count} episodes are in the index")


def _tokens(  # noqa: PLR0913
    journal: JournalReader,
    row: Row,
    decode: Decode | None,
    *,
    start: int,
    limit: int,
    step: int | None = None,
    explain: Callable[[Row], Row] | None = None,
) -> Row:
    pieces = journal.pieces(int(row["episode"]))
    trained = journal.rows(
        "SELECT version FROM consumed WHERE number = ?", int(row["group_number"])
    )
    training = of_episode(journal, int(row["group_number"]), int(row["episode"]), step)
    if training and explain is not None:
        training = explain(training)
    shown: list[Row] = []
    total = sum(len(piece.tokens) for piece in pieces)
    sampled = 0
    for at, piece, turn in walk(pieces):
        first, last = max(0, start - at), start + limit - at
        ids = piece.tokens[first:last] if last > 0 else ()
        before = sampled + first
        sampled += len(piece.tokens) if isinstance(piece, Sampled) else 0
        if not ids:
            continue
        about: dict[str, Any] = {
            "start": at + first,
            "provenance": piece.provenance.name.lower(),
            "turn": turn,
            "ids": list(ids),
            "texts": [] if decode is None else texts(ids, decode),
        }
        if isinstance(piece, Sampled):
            about["version"] = piece.version
            about["lag"] = trained[0][0] - piece.version if trained else None
            about["behavior_logp"] = list(piece.behavior_logp[first:last])
            if training:
                about["trained"] = cut(training["tokens"], before, before + len(ids))
        shown.append(about)
    return {
        "num_tokens": total,
        "start": start,
        "end": min(total, start + limit),
        "trained_version": trained[0][0] if trained else None,
        "training": {name: value for name, value in training.items() if name != "tokens"} or None,
        "has_texts": decode is not None,
        "pieces": shown,
    }


def texts(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token, so that they join to the text of all.

    A character that has several tokens is given to the first of them, and the others are empty.
    """
    parts: list[str] = []
    at = 0
    while at < len(tokens):
        count = 1
        text = decode(tokens[at : at + 1])
        while "\ufffd" in text and count < JOINED and at + count < len(tokens):
            longer = decode(tokens[at : at + count + 1])
            count += 1
            if "\ufffd" not in longer:
                text = longer
                break
        else:
            if "\ufffd" in text:
                count = 1
        parts += [text, *[""] * (count - 1)]
        at += count
    if "".join(parts) == decode(tokens):
        return parts
    return _texts_in_context(tokens, decode)


def _texts_in_context(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token for a tokenizer that decodes a token by its neighbours."""
    parts = []
    for at in range(len(tokens)):
        begin = max(0, at - JOINED)
        before, now = decode(tokens[begin:at]), decode(tokens[begin : at + 1])
        parts.append(now[len(before) :] if now.startswith(before) else "")
    return parts
