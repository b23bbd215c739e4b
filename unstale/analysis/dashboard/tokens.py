"""Return one episode or one group of a run with its tokens, which are read from the journal."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from unstale.analysis.dashboard import limits
from unstale.analysis.dashboard.database import COLUMNS
from unstale.analysis.dashboard.index import RunIndex
from unstale.analysis.dashboard.journals import open_journal
from unstale.analysis.dashboard.table import BadQuestion, as_row
from unstale.analysis.dashboard.training import cut, of_episode
from unstale.durability.journal import JournalError, JournalReader
from unstale.durability.journal.conversations import Decode, load_decoder
from unstale.durability.run_folder import Row
from unstale.records import Fork, Piece, Placed, Sampled, common_prefix, walk

MAX_TOKENS = 8000
"""Largest number of tokens of an episode in one answer. Longer episodes are read in parts."""

MAX_SIBLING_TOKENS = 3000
MAX_SIBLINGS = 32

WINDOW_BEFORE = 100
"""Number of tokens that are shown before the first difference between siblings (episodes of the
same group).
"""

WINDOW_TOKENS = 500
"""Number of tokens that are shown around the first difference between siblings, if it comes after
their first `MAX_SIBLING_TOKENS` tokens.
"""

FINISHED = ("trained", "waiting")
"""Outcomes of an episode that reached its end, neither failed nor restarted."""

JOINED = 8
"""Largest number of tokens that are decoded together. A character may consist of several tokens."""


class UnknownEpisode(LookupError):
    """Error: the run has no episode or group of the requested number."""


class NotYet(RuntimeError):
    """Error: the requested episodes are not in the run's index yet, which is being filled."""


def episode(
    index: RunIndex,
    number: int,
    start: int = 0,
    limit: int = MAX_TOKENS,
    step: int | None = None,
) -> Row:
    """Return an episode: its row of the table of episodes, and `limit` tokens from position `start`
    on.

    Trained tokens have the values of `step`, by default the first step that trained on them, with
    the run's limits on D and S (`limits.of_training`). Lags (staleness) are those in this step.

    Raises `UnknownEpisode`, `NotYet`, `JournalError` if the journal is damaged, and `BadQuestion`
    if an argument is not valid.
    """
    if start < 0 or not 1 <= limit <= MAX_TOKENS:
        raise BadQuestion(f"start must be >= 0 and limit between 1 and {MAX_TOKENS}")
    row = _row(index, number)
    with open_journal(index.folder) as journal:
        recorded = _read(journal, row, step)
    if recorded.training:
        recorded = replace(recorded, training=limits.of_training(index.folder, recorded.training))
    row["conversations"] = _conversations(index, row)
    return row | recorded.shown(_decoder(index), start=start, limit=limit)


def group(index: RunIndex, number: int) -> Row:
    """Return the episodes of a group, with the position at which each differs from a reference
    episode.

    The reference (`compared_with`) is the first episode that finished. If none did, it is the first
    that has tokens. `first_difference` of an episode is the position of the first token that
    differs from the reference. If one of the two is a prefix of the other, it is the length of the
    shorter one. It is None if both are equal, or if the episode has no tokens. `common_tokens` is
    the number of tokens at the beginning that all episodes share.

    Each episode has its first `MAX_SIBLING_TOKENS` tokens. If it differs only after these, `window`
    has the tokens around the first difference. The window of the reference is around the smallest
    such position.
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
    members = [_row(index, episode) for (episode,) in rows]
    with open_journal(index.folder) as journal:
        found = [_read_or_note(journal, member) for member in members]
    streams = [[] if each is None else each.ids for each in found]
    reference = _reference(members, streams)
    decode = _decoder(index)
    differences = [
        None if reference is None else _difference(streams[reference], stream) for stream in streams
    ]
    late = [each for each in differences if each is not None and each >= MAX_SIBLING_TOKENS]
    for position, recorded in enumerate(found):
        if recorded is None:
            continue
        differs = differences[position]
        around = min(late, default=None) if position == reference else differs
        members[position] |= recorded.shown(decode, start=0, limit=MAX_SIBLING_TOKENS)
        members[position]["first_difference"] = differs
        members[position]["window"] = _window(recorded, decode, around)
    return {
        "group_number": number,
        "task": members[0].get("task"),
        "num_episodes": total,
        "compared_with": None if reference is None else members[reference]["episode"],
        "common_tokens": common_prefix([stream for stream in streams if stream]),
        "members": members,
    }


def _read_or_note(journal: JournalReader, member: Row) -> "_Recorded | None":
    """Return an episode of the journal. If it is damaged, return None and write the reason into
    `member`.
    """
    try:
        return _read(journal, member)
    except JournalError as error:
        member["problem"] = str(error)
        return None


def _reference(members: Sequence[Row], streams: Sequence[Sequence[int]]) -> int | None:
    """Return the position in `members` of the episode with which the others are compared. None if
    no episode has tokens.
    """
    with_tokens = [position for position, stream in enumerate(streams) if stream]
    finished = [each for each in with_tokens if members[each]["outcome"] in FINISHED]
    return next(iter([*finished, *with_tokens]), None)


def _difference(reference: Sequence[int], stream: Sequence[int]) -> int | None:
    """Return the first position at which two token sequences differ, or the length of the shorter
    one if it is a prefix.

    None if they are equal or `stream` is empty.
    """
    return None if not stream or stream == reference else common_prefix([reference, stream])


def _window(recorded: "_Recorded", decode: Decode | None, around: int | None) -> Row | None:
    """Return the tokens around the position `around`. None if `around` is None or among the first
    `MAX_SIBLING_TOKENS` positions, which are shown anyway.
    """
    if around is None or around < MAX_SIBLING_TOKENS:
        return None
    start = max(MAX_SIBLING_TOKENS, min(around, recorded.num_tokens) - WINDOW_BEFORE)
    part = recorded.shown(decode, start=start, limit=WINDOW_TOKENS)
    return {name: part[name] for name in ("start", "end", "pieces")} if part["pieces"] else None


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


def _conversations(index: RunIndex, row: Row) -> list[Row]:
    """Return number and role of each conversation of an episode. The role may be None.

    Conversations without a role are left out of failed episodes, which may have several attempts.
    """
    rows = index.database.rows(
        "SELECT episode, role FROM episodes WHERE group_number = ? AND sibling = ? AND outcome = ? "
        "AND (role IS NOT NULL OR outcome != 'failed') ORDER BY episode LIMIT ?",
        (row["group_number"], row["sibling"], row["outcome"], MAX_SIBLINGS),
    )
    return [{"episode": number, "role": role} for number, role in rows]


def _missing(index: RunIndex, what: str) -> UnknownEpisode | NotYet:
    if index.is_complete:
        return UnknownEpisode(f"the run has no {what}")
    return NotYet(f"{what} is not read yet: {index.coverage}")


@dataclass(frozen=True, slots=True)
class _Recorded:
    pieces: Sequence[Piece]
    trained_version: int | None
    """Version of the policy that was first trained on the episode. None if it was not trained
    on.
    """
    training: Row
    """The values of the sampled tokens in a step (`training.of_episode`). Empty if the journal has
    none.
    """
    fork: Fork | None

    @property
    def ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.tokens) for piece in self.pieces)

    def shown(self, decode: Decode | None, *, start: int, limit: int) -> Row:
        """Return `limit` tokens from position `start` on, with their texts (with `decode`) and
        values in training.
        """
        training = self.training
        version = training["version"] if training else self.trained_version
        shown: list[Row] = []
        sampled = 0
        for at, piece, turn in walk(self.pieces):
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
                about["lag"] = None if version is None else version - piece.version
                about["behavior_logp"] = list(piece.behavior_logp[first:last])
                if training:
                    about["trained"] = cut(training["tokens"], before, before + len(ids))
            if isinstance(piece, Placed):
                about["placed"] = True
                if piece.source_logp is not None:
                    about["source_version"] = piece.version
                    about["source_logp"] = list(piece.source_logp[first:last])
            shown.append(about)
        return {
            "num_tokens": self.num_tokens,
            "start": start,
            "end": min(self.num_tokens, start + limit),
            "trained_version": version,
            "fork": self.fork and {"parent": self.fork.parent, "at": self.fork.at},
            "training": {name: each for name, each in training.items() if name != "tokens"} or None,
            "has_texts": decode is not None,
            "pieces": shown,
        }


def _read(journal: JournalReader, row: Row, step: int | None = None) -> _Recorded:
    """Read an episode from the journal, with its values in `step`, by default the first step that
    trained on it.
    """
    group, episode = int(row["group_number"]), int(row["episode"])
    trained = journal.rows("SELECT version FROM consumed WHERE number = ?", group)
    pieces = journal.pieces(episode)
    return _Recorded(
        pieces=pieces,
        trained_version=trained[0][0] if trained else None,
        training=of_episode(journal, group, episode, step),
        fork=journal.fork(episode, pieces),
    )


def texts(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token. Joined, they are the text of all tokens.

    If a character consists of several tokens, the first has the character and the others have "".
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
    """Return the text of each token, for a tokenizer whose decoding depends on the tokens before
    it.
    """
    parts = []
    for at in range(len(tokens)):
        begin = max(0, at - JOINED)
        before, now = decode(tokens[begin:at]), decode(tokens[begin : at + 1])
        parts.append(now[len(before) :] if now.startswith(before) else "")
    return parts
