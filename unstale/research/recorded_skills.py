"""The skills that helped in a run: those that were used in solved tasks of its recorded chains."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from unstale.config import ConfigError
from unstale.durability.journal import JOURNAL, JournalReader
from unstale.durability.journal.conversations import Decode, load_decoder
from unstale.records import Trajectory, is_reply
from unstale.research.envs.chain import NOT_KEPT, REQUEST
from unstale.research.skills import Skill, read_list

SpokenTurns = Iterable[tuple[bool, str]]
"""The turns of an episode as text: (True for a reply of the policy, its text)."""
_REQUEST = REQUEST.partition("\n")[0]


def used_skills(turns: SpokenTurns, facts: Mapping[str, float]) -> Iterator[Skill]:
    """Yield the skills that the solved tasks of a chain have used, once for each of these tasks.

    `turns` are those of all its conversations, and `facts` the facts of the episode.
    """
    task, writes = 1, True
    listed: tuple[Skill, ...] = ()
    used: dict[tuple[int, str], Skill] = {}
    for by_policy, text in turns:
        if by_policy:
            solved = not writes and facts.get(f"solved_{task}", 0) >= 1
            named = [each for each in listed if each.is_named(text)] if solved else []
            used |= {(task, each.line): each for each in named}
        elif _REQUEST in text:
            task, writes = task + 1, True
        elif writes and NOT_KEPT not in text:
            listed, writes = read_list(text), False
    yield from used.values()


def count_skills(run: Path) -> list[tuple[Skill, int]]:
    """Return the skills that solved tasks of a run have used, with the number of these tasks.

    The most used ones come first, then those that were used first. There is only one of each name.
    Raises `ConfigError` if the run has no chains that ended, `OSError` or `ValueError` for a
    damaged run folder.
    """
    decode = load_decoder(run, special=False)
    counts: Counter[str] = Counter()
    skills: dict[str, Skill] = {}
    num_chains = 0
    with JournalReader(run / JOURNAL) as journal:
        for row in journal.groups():
            if row.finished is None:
                continue
            for episode in journal.group(row.number).trajectories:
                num_chains += "solved_1" in episode.facts
                for skill in used_skills(_turns(episode, decode), episode.facts):
                    skills.setdefault(skill.line, skill)
                    counts[skill.line] += 1
    if not num_chains:
        raise ConfigError(
            f"{run} has no ended chain of tasks: skills are written in runs with "
            "--task.env chain:ENV"
        )
    best: dict[str, tuple[Skill, int]] = {}
    for line, count in counts.most_common():
        best.setdefault(skills[line].name, (skills[line], count))
    return list(best.values())


def _turns(episode: Trajectory, decode: Decode) -> Iterator[tuple[bool, str]]:
    for each in episode.conversations:
        for by_policy, pieces in groupby(each.pieces, is_reply):
            yield by_policy, decode([token for piece in pieces for token in piece.tokens])
