"""Conversations in readable form from a journal, for reports and exports."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unstale.durability.journal.reader import JournalReader, StoredEpisode
from unstale.durability.journal.tables import grade
from unstale.durability.run_folder import TOKENIZER
from unstale.pictures import decoded
from unstale.records import Piece, Sampled, Task, Trajectory, is_reply

Decode = Callable[[Sequence[int]], str]
"""A function that turns token ids into text."""


def load_decoder(run: Path) -> Decode:
    """Return the function that turns the tokens of a run into text.

    Raises OSError or ValueError if the run's `tokenizer.json` cannot be read.
    """
    from tokenizers import Tokenizer

    path = run / TOKENIZER
    if path.is_symlink() or not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    return lambda tokens: decoded(tokens, decode)


TRAINED = """
SELECT episode, step, env, split, groups.task, stop, rewards, facts,
    (SELECT group_concat(DISTINCT version) FROM pieces
     WHERE pieces.episode = episodes.episode AND version IS NOT NULL AND num_tokens > 0)
FROM consumed JOIN groups USING (number) JOIN episodes USING (number)
JOIN trajectories USING (episode) LEFT JOIN notes USING (episode)
WHERE coalesce(notes.writes, 0) = 0 AND stop IS NOT 'pruned'
ORDER BY step, consumed.place, sibling, episode"""


def trained_episodes(journal: JournalReader) -> Iterator[dict[str, Any]]:
    """Yield a summary of every episode that was trained on, in the order of training.

    Tokens are not read. Raises `JournalError` if the journal is damaged.
    """
    for episode, step, env, split, index, stop, rewards, facts, versions in journal.rows(TRAINED):
        with journal.wrap_errors(f"episode {episode}"):
            success, reward = grade(json.loads(rewards), json.loads(facts))
        yield {
            "step": step,
            "episode": episode,
            "task": Task(env, split, index).key,
            "reward": reward,
            "success": success,
            "stop": stop,
            "versions": sorted(int(version) for version in versions.split(",")) if versions else [],
        }


def conversation(stored: StoredEpisode, decode: Decode) -> dict[str, Any]:
    """Return an episode as text: its summary, and `turns` with `role`, `text` and `pieces`.

    A piece is a part of a reply that one version of the weights sampled.
    """
    trajectory = stored.trajectory
    return {
        "step": stored.step,
        "episode": trajectory.episode,
        "task": trajectory.task.key,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "stop": trajectory.stop,
        **fork_columns(trajectory),
        "versions": sorted(trajectory.versions),
        "num_tokens": len(trajectory),
        "turns": _turns(trajectory.pieces, decode),
    }


def fork_columns(trajectory: Trajectory) -> dict[str, int | None]:
    """Return the columns of an export about the fork of an episode. They are None without one."""
    fork = trajectory.fork
    return {"parent": fork.parent if fork else None, "forked_at": fork.at if fork else None}


def _turns(pieces: Sequence[Piece], decode: Decode) -> list[dict[str, Any]]:
    """Join successive tokens of the policy, and successive tokens of the environment, into turns.

    A reply that a weight update interrupted has one piece for each version that sampled it.
    """
    turns: list[dict[str, Any]] = []
    for piece in pieces:
        version = piece.version if isinstance(piece, Sampled) else None
        role = "assistant" if is_reply(piece) else "environment"
        text = decode(piece.tokens)
        row = {
            "text": text,
            "version": version,
            "provenance": piece.provenance.name,
            "num_tokens": len(piece.tokens),
        }
        if turns and turns[-1]["role"] == role:
            turns[-1]["text"] += text
            turns[-1]["pieces"].append(row)
        else:
            turns.append({"role": role, "text": text, "pieces": [row]})
    return turns
