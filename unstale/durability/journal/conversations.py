"""Read the episodes in a journal as text, for reports and exports."""

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
"""The type of functions that turn token ids into text."""


def load_decoder(run: Path, *, special: bool = True) -> Decode:
    """Return a function that turns a run's token ids into text, with the run's own tokenizer.

    Without `special`, control tokens are left out.
    Raises `OSError` or `ValueError` if the run's `tokenizer.json` cannot be read.
    """
    from tokenizers import Tokenizer

    path = run / TOKENIZER
    if path.is_symlink() or not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    decode = partial(tokenizer.decode, skip_special_tokens=not special)
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

    It has the step, the task, the reward, the end and the versions, but no tokens. Raises
    `JournalError` if the journal is damaged.
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
    """Return an episode as text: a summary and `turns`, each with `role`, `text` and `pieces`.

    `role` is "assistant" or "environment". A turn has several pieces if a weight update interrupted
    a reply: one for each version of the weights that sampled a part of it. `decode` turns tokens
    into text.
    """
    trajectory = stored.trajectory
    return {
        "step": stored.step,
        "episode": trajectory.episode,
        "task": trajectory.task.key,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "stop": trajectory.stop,
        **role_columns(trajectory),
        **fork_columns(trajectory),
        "versions": sorted(trajectory.versions),
        "num_tokens": len(trajectory),
        "turns": _turns(trajectory.pieces, decode),
    }


def role_columns(trajectory: Trajectory) -> dict[str, Any]:
    """Return an export's columns about the policy's role: `role`, and its reward `role_reward`.

    They are None if the tasks have no roles.
    """
    role = trajectory.role or None
    return {"role": role, "role_reward": trajectory.role_reward if role else None}


def fork_columns(trajectory: Trajectory) -> dict[str, int | None]:
    """Return an export's columns about an episode's fork: `parent` and `forked_at`.

    `parent` is the number of the episode from which it was forked, and `forked_at` the number of
    tokens that both share. They are None if it was not forked.
    """
    fork = trajectory.fork
    return {"parent": fork.parent if fork else None, "forked_at": fork.at if fork else None}


def _turns(pieces: Sequence[Piece], decode: Decode) -> list[dict[str, Any]]:
    """Return an episode's turns. Successive pieces of the policy, or of the environment, are one
    turn.
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
