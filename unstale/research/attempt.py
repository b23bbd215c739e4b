"""Attempt each task several times, choose one of the attempts, and show what the choice is worth.

The choice is the answer that most attempts give, or the winner of a tournament in which the policy
compares attempts. A further attempt may be made that reads the conclusions of the best ones (PDR),
or a plan from the first attempt.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_uppercase

from unstale.builders import build_rollout
from unstale.builders.sampling import ends_freely
from unstale.cli.evaluate import HeldOut
from unstale.cli.grades import EvalResult
from unstale.config import ConfigError, RunConfig
from unstale.durability.console import Console
from unstale.envs import Taskset, Votable, implements, task_text
from unstale.envs.notes import NotedTasks
from unstale.records import Task, Trajectory
from unstale.research.attempt_result import PLANNED, AttemptResult
from unstale.research.search import Stages, beam_search
from unstale.research.techniques.retry import DATA, PLAN, PLANNED_BY
from unstale.research.votes import Choice, by_majority, by_tournament, judge_record
from unstale.rollout import evaluation
from unstale.rollout.answers import AnswerReader, last_reply
from unstale.rollout.episode import Rollout
from unstale.rollout.evaluation import Attempt, FinishedEpisodes
from unstale.rollout.seeds import derive_seed
from unstale.rollout.writer import PolicyWriter

COMPARE = f"""You compare attempts at a task. {DATA} Decide which attempt is right, or the most \
likely to be right. End with one line: best: LETTER"""
SUMMARISE = f"""You summarise an attempt at a task in at most 100 words: its hypotheses, how far \
it got, what failed, and its conclusion. {DATA}"""
CONCLUSIONS = "Earlier attempts ended as follows. They may be wrong: check them, then answer."
_VERDICT = re.compile(r"best:[\W_]*([A-Z])\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOptions:
    """How often a task is attempted, and how one of the attempts is chosen."""

    attempts: int = 8
    votes: int = 0
    """Number of votes of the policy on each comparison; 0 takes the majority of the answers."""
    group: int = 2
    """Number of attempts in a comparison: 2 compares pairs."""
    distil: int = 0
    """Number of attempts whose conclusions a further attempt reads; 0 makes none."""
    plan: bool = False
    """Make a second attempt with a plan that the policy writes from the first."""
    summaries: bool = False
    """Compare summaries that the policy writes, instead of the last replies. The further attempt
    of `distil` reads them, too.
    """
    search: int = 0
    """Number of stages of a search, each with `attempts` candidates; 0 makes none."""
    beam: int = 2
    """Number of candidates that the search keeps after each stage."""
    stage_turns: int = 1
    """Number of replies of a stage. The last one has no limit."""

    def check(self, taskset: Taskset) -> None:
        """Raise `ConfigError` if attempts at the tasks cannot be compared in this way."""
        if not self.attempts > 1:
            raise ConfigError(f"--attempts must be at least 2 to choose, got {self.attempts}")
        if not self.votes and not implements(taskset, Votable):
            raise ConfigError(
                f"the tasks of {taskset.name} have no answers that can be counted: set --votes to "
                "let the policy compare attempts"
            )
        if self.group > min(self.attempts, len(ascii_uppercase)):
            raise ConfigError(
                f"--group must be at most --attempts ({self.attempts}) and "
                f"{len(ascii_uppercase)}, got {self.group}"
            )
        if self.distil > self.attempts:
            raise ConfigError(
                f"--distil must be at most --attempts ({self.attempts}), got {self.distil}"
            )
        if self.search and not self.votes:
            raise ConfigError("--search needs --votes above 0: the policy judges the candidates")
        names = {"--distil": self.distil, "--plan": self.plan, "--search": self.search}
        if (used := [name for name, is_used in names.items() if is_used]) and ends_freely(taskset):
            raise ConfigError(
                f"{used[0]} cannot be used with {taskset.name}, an external agent, which leads its "
                "conversations itself"
            )


def attempt(
    trained: Path | str,
    config: RunConfig,
    options: AttemptOptions,
    *,
    console: Console | None = None,
) -> AttemptResult:
    """Attempt the held-out tasks of a configuration, and choose an attempt at each.

    `trained` is a run folder or a model folder. Raises `ConfigError` for wrong settings, and
    `RunFailed` if a component fails.
    """
    return attempt_all(HeldOut.of(trained, config, options.attempts), options, console=console)


def attempt_all(
    held_out: HeldOut, options: AttemptOptions, *, console: Console | None = None
) -> AttemptResult:
    """Attempt held-out tasks as `attempt` does. `held_out` has each `options.attempts` times."""
    options.check(held_out.taskset)
    if not held_out.config.eval.temperature:
        raise ConfigError(
            "eval.temperature must be above 0 to attempt tasks several times, got 0: all attempts "
            "at a task would be the same"
        )

    async def work(rollout: Rollout, progress: Callable[..., None]) -> AttemptResult:
        return await _Procedure(held_out, options, rollout, progress).run()

    return held_out.run(work, console=console)


class KeptEpisodes(FinishedEpisodes):
    """The finished episodes of an evaluation, by attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes: dict[Attempt, Trajectory] = {}

    def add(self, attempt: Attempt, episode: Trajectory) -> None:
        super().add(attempt, episode)
        self.episodes[attempt] = episode


class _Procedure:
    """Attempts at all tasks, and the choices among them, while the engine runs."""

    def __init__(
        self,
        held_out: HeldOut,
        options: AttemptOptions,
        rollout: Rollout,
        progress: Callable[..., None],
    ) -> None:
        self._held_out = held_out
        self._options = options
        self._rollout = rollout
        self._progress = progress
        self._writer = PolicyWriter(rollout.generator)
        self._seed = held_out.config.seed
        self._tasks = held_out.tasks[:: options.attempts]
        self._kept = KeptEpisodes()
        self._shown: dict[str, Mapping[int, str]] = {}
        """What the judge read of each attempt, by task and attempt."""

    async def run(self) -> AttemptResult:
        """Attempt the tasks, choose, and attempt them again as the options say."""
        options = self._options
        graded = await self._evaluate(self._rollout, self._held_out.tasks, self._kept)
        tokens = {"attempts": _sampled(self._kept)}
        choices = await self._choose()
        if options.votes:
            tokens["votes"] = self._writer.tokens
        chosen = {self._name_of_choice(): [self._success(task, choices) for task in self._tasks]}
        if options.distil:
            notes = self._conclusions(choices)
            name = f"answer from {options.distil} attempts"
            chosen[name], tokens["distilled"] = await self._again(notes)
        if options.plan:
            before = self._writer.tokens
            plans = await self._plans()
            chosen[PLANNED], tokens["planned"] = await self._again(plans)
            tokens["planned"] += self._writer.tokens - before
        if options.search:
            name = f"search with {options.search} stages"
            chosen[name], tokens["search"] = await self._search()
        asked = [
            vote for each in choices.values() for one in each.comparisons for vote in one.votes
        ]
        records = [
            judge_record(choices[task.key].comparisons, self._successes(task))
            for task in self._tasks
            if task.key in choices
        ]
        return AttemptResult(
            attempts=EvalResult.of(graded, options.attempts),
            first=tuple(graded[:: options.attempts]),
            chosen=chosen,
            judge=[each for each in records if each is not None],
            unread=asked.count(None) / len(asked) if asked else 0.0,
            tokens=tokens,
        )

    def _name_of_choice(self) -> str:
        options = self._options
        if not options.votes:
            return f"majority of {options.attempts} answers"
        votes = "1 vote" if options.votes == 1 else f"{options.votes} votes"
        return f"best by {votes} on each {'pair' if options.group == 2 else f'{options.group}'}"

    async def _evaluate(
        self, rollout: Rollout, tasks: Sequence[Task], finished: FinishedEpisodes
    ) -> list[bool | None]:
        return await evaluation.evaluate(
            rollout,
            tasks,
            seed=self._seed,
            progress=self._progress,
            finished=finished,
            trial=finished is self._kept,
        )

    async def _again(self, notes: Mapping[str, str]) -> tuple[list[bool | None], int]:
        """Return the success of one more attempt at each task, and its number of tokens.

        `notes` has what the attempt reads, by task. The random numbers are those of the first
        attempt, so without notes the attempt is the same.
        """
        config, taskset = self._held_out.config, NotedTasks(self._held_out.taskset, notes)
        make = build_rollout(config, taskset)
        rollout = make(self._rollout.generator, taskset, config.rollout)
        kept = KeptEpisodes()
        return await self._evaluate(rollout, self._tasks, kept), _sampled(kept)

    async def _choose(self) -> dict[str, Choice]:
        """Return the choice among the finished attempts at each task. No element without one."""
        done = 0
        self._progress("choices", done=0, total=len(self._tasks))

        async def one(task: Task) -> Choice | None:
            nonlocal done
            choice = await self._choose_one(task)
            done += 1
            self._progress("choices", done=done, total=len(self._tasks))
            return choice

        async with asyncio.TaskGroup() as running:
            asked = {task.key: running.create_task(one(task)) for task in self._tasks}
        results = {key: each.result() for key, each in asked.items()}
        return {key: choice for key, choice in results.items() if choice}

    async def _choose_one(self, task: Task) -> Choice | None:
        options = self._options
        episodes = self._episodes(task)
        numbers = sorted(episodes)
        if not numbers:
            return None
        if not options.votes:
            random = Random(derive_seed(self._seed, "choice", task.key))
            read = AnswerReader(self._held_out.taskset, self._rollout.generator.chat)
            choice = by_majority([read(episodes[number]) for number in numbers], random)
            return Choice(tuple(numbers[place] for place in choice.ranking))
        texts = {number: await self._text(task, number) for number in numbers}
        self._shown[task.key] = texts
        return await self._tournament(task, texts)

    async def _tournament(self, task: Task, texts: Mapping[int, str], *place: int) -> Choice:
        """Return the choice of the policy among texts, by number. `place` makes other seeds."""
        options = self._options

        async def ask(attempts: Sequence[int], vote: int) -> int | None:
            letters = dict(zip(ascii_uppercase, attempts, strict=False))
            seed = derive_seed(self._seed, "vote", *place, task.key, *sorted(attempts), vote)
            shown = {letter: texts[number] for letter, number in letters.items()}
            verdict = await self._writer.write(COMPARE, seed, task=self._words(task), **shown)
            return letters.get(read_letter(verdict))

        random = Random(derive_seed(self._seed, "choice", *place, task.key))
        return await by_tournament(
            list(texts), ask, votes=options.votes, group=options.group, random=random
        )

    async def _text(self, task: Task, number: int) -> str:
        """Return what the judge reads of an attempt: its last reply, or a summary."""
        episode = self._episodes(task)[number]
        if not self._options.summaries:
            return self._last_reply(episode)
        seed = derive_seed(self._seed, "summary", task.key, number)
        attempt = self._whole(episode)
        return await self._writer.write(SUMMARISE, seed, task=self._words(task), attempt=attempt)

    def _conclusions(self, choices: Mapping[str, Choice]) -> dict[str, str]:
        """Return the note with the conclusions of the best attempts, by task.

        Together they have at most as many characters as the context has tokens, so that they fit.
        """
        notes = {}
        most = self._held_out.config.engine.max_context // self._options.distil
        for task in self._tasks:
            ranking = choices[task.key].ranking if task.key in choices else ()
            episodes = self._episodes(task)
            shown = self._shown.get(task.key, {})
            best = ranking[: self._options.distil]
            texts = [shown.get(each) or self._last_reply(episodes[each]) for each in best]
            lines = [f"{number}. {text[-most:]}" for number, text in enumerate(texts, 1)]
            notes[task.key] = "\n".join([CONCLUSIONS, *lines]) if lines else ""
        return notes

    async def _search(self) -> tuple[list[bool | None], int]:
        """Return the success of a search at each task, and its number of tokens with votes."""
        options, before = self._options, self._writer.tokens
        places = asyncio.Semaphore(max(1, evaluation.MAX_CONCURRENT // options.attempts))
        sampled = 0

        async def one(task: Task) -> bool | None:
            nonlocal sampled
            turns, seed = options.stage_turns, derive_seed(self._seed, "search")
            made = Stages(self._rollout, task, seed, stages=options.search, turns=turns)

            async def rank(candidates: Sequence[Trajectory]) -> Sequence[Trajectory]:
                texts = {number: self._whole(each) for number, each in enumerate(candidates)}
                choice = await self._tournament(task, texts, len(candidates))
                return [candidates[number] for number in choice.ranking]

            async with places:
                best = await beam_search(
                    made.extend,
                    rank,
                    stages=options.search,
                    width=options.attempts,
                    beam=options.beam,
                )
            sampled += made.tokens
            return best.success if best else None

        async with asyncio.TaskGroup() as running:
            asked = [running.create_task(one(task)) for task in self._tasks]
        return [each.result() for each in asked], sampled + self._writer.tokens - before

    async def _plans(self) -> dict[str, str]:
        """Return the note with a plan from the first attempt, by task. Empty without a plan."""

        async def plan(task: Task) -> str:
            episode = self._episodes(task).get(0)
            if episode is None:
                return ""
            seed = derive_seed(self._seed, "plan", task.key)
            attempt = self._whole(episode)
            text = await self._writer.write(PLAN, seed, task=self._words(task), attempt=attempt)
            return f"{PLANNED_BY}\n{text}" if text.strip() else ""

        async with asyncio.TaskGroup() as running:
            asked = {task.key: running.create_task(plan(task)) for task in self._tasks}
        return {key: each.result() for key, each in asked.items()}

    def _episodes(self, task: Task) -> dict[int, Trajectory]:
        """Return the finished attempts at a task by number."""
        attempts = ((task.key, number) for number in range(self._options.attempts))
        return {
            each[1]: self._kept.episodes[each] for each in attempts if each in self._kept.episodes
        }

    def _successes(self, task: Task) -> list[bool | None]:
        episodes = self._episodes(task)
        return [
            episodes[number].success if number in episodes else None
            for number in range(self._options.attempts)
        ]

    def _success(self, task: Task, choices: Mapping[str, Choice]) -> bool | None:
        """Return the success of the chosen attempt. None if all attempts failed."""
        choice = choices.get(task.key)
        return self._episodes(task)[choice.ranking[0]].success if choice else None

    def _words(self, task: Task) -> str:
        """Return the text of a task, or else the prompt of its first attempt."""
        episodes = self._episodes(task)
        opening = next(iter(episodes.values())).pieces[0].tokens if episodes else ()
        return task_text(self._held_out.taskset, task) or self._rollout.generator.chat.text(opening)

    def _whole(self, episode: Trajectory) -> str:
        return self._rollout.generator.chat.text(episode.tokens)

    def _last_reply(self, episode: Trajectory) -> str:
        """Return the text of an episode's last reply, or its tool calls if it has no text."""
        reply = last_reply(episode, self._rollout.generator.chat)
        calls = [f"{each.name} {json.dumps(dict(each.arguments))}" for each in reply.tool_calls]
        return reply.content or "\n".join(calls)


def read_letter(verdict: str) -> str:
    """Return the letter that a verdict names as the best. Empty if it names none.

    >>> read_letter("B errs. Best: A"), read_letter("C."), read_letter("A or B")
    ('A', 'C', '')
    """
    named = _VERDICT.findall(verdict)
    if named:
        return str(named[-1]).upper()
    alone = verdict.strip(" \n.*()[]:'\"").upper()
    return alone if len(alone) == 1 and alone in ascii_uppercase else ""


def _sampled(kept: KeptEpisodes) -> int:
    return sum(each.num_sampled_in_all for each in kept.episodes.values())
