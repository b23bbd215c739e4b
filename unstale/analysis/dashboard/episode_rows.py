"""Convert the journal's rows of an episode into data of the run's index: columns, figures, text."""

import json
import sqlite3
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from unstale.durability.journal.tables import grade
from unstale.durability.run_folder import Row
from unstale.observe.words import number

Piece = tuple[int, int, int, int | None, bytes, bytes | None]
"""A row of the journal with consecutive tokens of an episode: episode, position, number of tokens,
version that sampled them (None for context), tokens as packed integers, behavior_logp as packed
float32.
"""

PIECES = (
    "SELECT episode, position, num_tokens, version, tokens, behavior_logp "
    "FROM pieces WHERE episode = ? ORDER BY position"
)

MAX_FIGURES = 64
"""Largest number of rewards, and of facts (numbers that the environment reports), that are kept for
an episode.
"""


def measure_pieces(pieces: Sequence[Piece]) -> Row:
    """Return the columns of the table of episodes that are computed from an episode's tokens.

    Raises ValueError if the bytes of packed tokens do not fit their number.
    """
    versions: set[int] = set()
    turns = tokens = sampled = 0
    logps: list[bytes] = []
    in_reply = False
    for _, _, count, version, ids, packed in pieces:
        if len(ids) != 2 * count and len(ids) != 4 * count:
            raise _wrong_size(ids, count)
        tokens += count
        if not count:
            continue
        if version is None:
            in_reply = False
            continue
        turns += not in_reply
        in_reply = True
        sampled += count
        versions.add(version)
        logps.append((packed or b"")[: 4 * count])
    values = np.frombuffer(b"".join(logps), "<f4")
    return {
        "tokens": tokens,
        "sampled_tokens": sampled,
        "turns": turns,
        "versions": len(versions),
        "version_min": min(versions, default=None),
        "version_max": max(versions, default=None),
        "behavior_logp_mean": float(values.sum(dtype=np.float64)) / sampled if sampled else None,
        "behavior_logp_min": float(values.min()) if len(values) else None,
    }


def add_outcome(writer: sqlite3.Connection, end: Sequence[Any]) -> Row:
    """Return the columns that describe how an episode ended. Write its rewards and facts into the
    table `figures`.

    Facts are numbers that the environment reports. `end` is the journal's row on the end of the
    episode.
    """
    episode, stop, rewards, facts, stage, error, reason, step, *_ = end
    if stop is None:
        failed = stage is not None
        return {
            "outcome": "failed" if failed else "restarted",
            "stop": f"failed in {stage}"[:200] if failed else "restarted",
            "note": str(error if failed else reason)[:2000],
        }
    rewards, facts = json.loads(rewards), json.loads(facts)
    success, reward = grade(rewards, facts)
    _add_figures(writer, episode, {"reward": rewards, "fact": facts})
    return {
        "outcome": "waiting" if step is None else "trained",
        "stop": str(stop)[:200],
        "reward": reward,
        "success": int(success),
        "step": step,
    }


def _add_figures(writer: sqlite3.Connection, episode: int, figures: Mapping[str, Row]) -> None:
    rows = [
        (episode, f"{prefix}:{name}"[:200], value)
        for prefix, values in figures.items()
        for name, item in islice(values.items(), MAX_FIGURES)
        if (value := number(item)) is not None
    ]
    writer.executemany("INSERT OR REPLACE INTO figures VALUES (?, ?, ?)", rows)


def _wrong_size(packed: bytes, count: int) -> ValueError:
    return ValueError(f"{len(packed)} bytes cannot be {count} tokens")


def text_of(pieces: Sequence[Piece], decode: Callable[[Sequence[int]], str]) -> str:
    """Return the decoded text of an episode. Raises ValueError if packed tokens have a wrong
    size.
    """
    tokens: list[int] = []
    for _, _, count, _, packed, _ in pieces:
        if len(packed) not in (2 * count, 4 * count):
            raise _wrong_size(packed, count)
        tokens += array("H" if len(packed) == 2 * count else "I", packed)
    return decode(tokens)
