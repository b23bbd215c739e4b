"""Attempt each task several times, choose one of the attempts, and measure the gain in success.

The chosen attempt has the answer that most attempts give, wins a tournament in which the policy
compares attempts, or has the highest score of a reward model. Optionally, one more attempt is made,
or new populations of attempts. Before them, the policy reads the conclusions of the best attempts
(PDR) or a plan from the first attempt. Or a beam search in stages finds this attempt.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import combinations, islice
from math import inf
from pathlib import Path
from random import Random
from string import ascii_uppercase
from typing import Any, cast

from unstale.builders import build_rollout
from unstale.builders.sampling import ends_freely, has_several_conversations
from unstale.cli.evaluate import HeldOut
from unstale.cli.grades import EvalResult
from unstale.config import ConfigError, RunConfig
from unstale.durability.console import Console
from unstale.durability.run_folder import write_whole
from unstale.envs import Message, Taskset, Votable, implements, task_text
from unstale.envs.notes import NotedTasks
from unstale.records import Task, Trajectory, replies
from unstale.research.attempt_result import PLANNED, AttemptResult
from unstale.research.collect import CollectedTasks
from unstale.research.quality_head import QualityHead
from unstale.research.scores import FolderScorer, Scorer
from unstale.research.search import StagedAttempts, beam_search
from unstale.research.served_writer import DATA, Writer
from unstale.research.stages import StagedTasks, Stages, passed
from unstale.research.techniques.retry import PLAN, PLANNED_BY
from unstale.research.votes import (
    Choice,
    Comparison,
    by_majority,
    by_tournament,
    judge_record,
)
from unstale.rollout import evaluation
from unstale.rollout.answers import AnswerReader, last_reply
from unstale.rollout.episode import Rollout
from unstale.rollout.evaluation import Attempt, FinishedEpisodes
from unstale.rollout.seeds import derive_seed
from unstale.rollout.writer import PolicyWriter, question, room

COMPARE = f"""You compare attempts at a task. {DATA} Decide which attempt is right, or the most \
likely to be right. End with one line: best: LETTER"""
SUMMARISE = f"""You summarise an attempt at a task in at most 100 words: its hypotheses, how far \
it got, what failed, and its conclusion. {DATA}"""
GO_ON = " This is a later part of the attempt. `earlier` summarises the parts before it: keep what \
matters of it."
"""What follows `SUMMARISE` for the second and each later part of a long attempt."""
CONCLUSIONS = "Earlier attempts ended as follows. They may be wrong: check them, then answer."
_VERDICT = re.compile(r"best:[\W_]*([A-Z])\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOptions:
    """Options of attempts: how often a task is attempted, and how one attempt is chosen."""

    attempts: int = 8
    votes: int = 0
    """Number of votes of the policy on each comparison of attempts; 0 chooses the most frequent
    answer without votes.
    """
    group: int = 2
    """Number of attempts in a comparison: 2 compares pairs."""
    distil: int = 0
    """Number of attempts whose conclusions the policy reads before one more attempt; 0 makes no
    such attempt.
    """
    rounds: int = 0
    """Number of new populations of `attempts` attempts, in place of one more attempt. Each reads
    the conclusions of the `distil` best attempts of the population before, and one of its attempts
    is chosen in the same way (PDR).
    """
    plan: bool = False
    """Make a second attempt with a plan that the policy writes from the first."""
    summaries: bool = False
    """Compare summaries that the policy writes, instead of the last replies. The further attempts
    of `distil` read them, too, also if attempts are chosen without votes.
    """
    search: int = 0
    """Number of stages of a beam search with `attempts` candidates in each stage; 0 makes no
    search.
    """
    beam: int = 2
    """Number of candidates that the search keeps after each stage."""
    stage_turns: int = 1
    """Number of replies in each stage of the search. The last stage has no limit."""
    stages: Path | None = None
    """A file with named stages, in place of `search` and `stage_turns`. Each has a text that the
    policy reads at its start, and a command that is run at its end.
    """
    weigh: bool = False
    """Weigh the answers by the forecasts of success with which the run pruned episodes."""

    def check(self, taskset: Taskset, *, scores: bool = False) -> None:
        """Raise `ConfigError` for options that contradict each other or do not suit the tasks.

        `scores` is True if a judge scores attempts.
        """
        if not self.attempts > 1:
            raise ConfigError(f"--attempts must be at least 2 to choose, got {self.attempts}")
        if self.search and self.stages:
            raise ConfigError("--search and --stages both divide attempts into stages: give one")
        if scores and (self.votes or self.weigh):
            raise ConfigError("a judge that scores attempts replaces --votes and --weigh")
        if not self.votes and not scores and not implements(taskset, Votable):
            raise ConfigError(
                f"the tasks of {taskset.name} have no answers that can be counted: set --votes to "
                "let the policy compare attempts, or --judge to a reward model"
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
        if self.summaries and not (self.votes or self.distil):
            raise ConfigError(
                "--summaries has no effect without --votes, which compares them, or --distil, "
                "which lets a further attempt read them: leave it out"
            )
        if self.rounds and not self.distil:
            raise ConfigError(
                "--rounds needs --distil above 0: the number of attempts whose conclusions a new "
                "population reads"
            )
        if self.weigh and self.votes:
            raise ConfigError("--weigh is for the majority of answers: leave out --votes")
        if (self.search or self.stages) and not (self.votes or scores):
            name = "--search" if self.search else "--stages"
            raise ConfigError(
                f"{name} needs --votes above 0, so that the policy judges the candidates, or a "
                "--judge that scores them"
            )
        names = {"--distil": self.distil, "--plan": self.plan, "--search": self.search}
        names |= {"--stages": self.stages is not None}
        if (used := [name for name, is_used in names.items() if is_used]) and ends_freely(taskset):
            raise ConfigError(
                f"{used[0]} cannot be used with {taskset.name}, an external agent, which leads its "
                "conversations itself"
            )
        if used and has_several_conversations(taskset):
            raise ConfigError(
                f"{used[0]} cannot be used with {taskset.name}, whose episodes have several "
                "conversations: set task.fresh to false"
            )


def attempt(  # noqa: PLR0913 - options of a command
    trained: Path | str,
    config: RunConfig,
    options: AttemptOptions,
    *,
    judge: Writer | Scorer | None = None,
    collect: Path | None = None,
    console: Console | None = None,
) -> AttemptResult:
    """Attempt the held-out tasks of a configuration, and choose an attempt at each.

    `trained` is a run folder or a model folder. `judge` compares attempts in place of the policy,
    or scores them. With a file `collect`, training tasks are attempted, and successes are written
    to it. Raises `ConfigError` for wrong settings, and `RunFailed` if a component fails.
    """
    head = QualityHead.of(Path(trained), config) if options.weigh else None
    held_out = HeldOut.of(trained, config, options.attempts)
    if not collect:
        return attempt_all(held_out, options, head=head, judge=judge, console=console)
    if ends_freely(held_out.taskset):
        raise ConfigError("--collect needs tasks with an environment, not an external agent")
    if has_several_conversations(held_out.taskset):
        raise ConfigError(
            f"--collect writes one conversation per episode, and those of {config.task.env} have "
            "several: set task.fresh to false"
        )
    inner: Any = held_out.taskset
    if options.stages:  # conversations have what the policy reads of them
        inner = StagedTasks(inner, Stages.read(options.stages))
    taskset = CollectedTasks(inner)
    drawn = islice(held_out.taskset.train(config.seed), config.eval.tasks)
    tasks = [task for task in drawn for _ in range(options.attempts)]
    held_out = replace(held_out, taskset=cast(Taskset, taskset), tasks=tasks)
    try:
        return attempt_all(held_out, options, head=head, judge=judge, console=console)
    finally:
        if taskset.begun:  # else nothing was attempted, and an earlier file stays
            write_whole(collect, "".join(f"{row}\n" for row in taskset.rows()), durable=True)


def attempt_all(
    held_out: HeldOut,
    options: AttemptOptions,
    *,
    head: QualityHead | None = None,
    judge: Writer | Scorer | None = None,
    console: Console | None = None,
) -> AttemptResult:
    """Attempt held-out tasks as `attempt` does. `held_out` has each task `options.attempts` times.

    `head` weighs the answers of attempts. `judge` compares attempts in place of the policy, or
    scores them.
    """
    options.check(held_out.taskset, scores=isinstance(judge, Scorer))
    if options.stages:
        taskset: Any = held_out.taskset
        staged = getattr(taskset, "inner", taskset)
        if not isinstance(staged, StagedTasks):
            taskset = staged = StagedTasks(taskset, Stages.read(options.stages))
        staged.require(held_out.tasks[0])
        held_out = replace(held_out, taskset=taskset)
    if not held_out.config.eval.temperature:
        raise ConfigError(
            "eval.temperature must be above 0 to attempt tasks several times, got 0: all attempts "
            "at a task would be the same"
        )

    async def work(rollout: Rollout, progress: Callable[..., None]) -> AttemptResult:
        return await _Procedure(held_out, options, head, judge, rollout, progress).run()

    return held_out.run(work, console=console)


class KeptEpisodes(FinishedEpisodes):
    """The finished episodes of an evaluation, by task and number of the attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes: dict[Attempt, Trajectory] = {}

    def add(self, attempt: Attempt, episode: Trajectory) -> None:
        super().add(attempt, episode)
        self.episodes[attempt] = episode


class _Procedure:
    """One execution of the command: attempts at all tasks, and the choices among them."""

    def __init__(  # noqa: PLR0913 - what chooses, and what it chooses among
        self,
        held_out: HeldOut,
        options: AttemptOptions,
        head: QualityHead | None,
        judge: Writer | Scorer | None,
        rollout: Rollout,
        progress: Callable[..., None],
    ) -> None:
        self._held_out = held_out
        self._options = options
        self._head = head
        if head:  # it reads the signals of sampled tokens
            make = build_rollout(held_out.config, held_out.taskset)
            generator = replace(rollout.generator, signals=True)
            rollout = make(generator, held_out.taskset, held_out.config.rollout)
        self._rollout = rollout
        self._progress = progress
        self._writer = PolicyWriter(rollout.generator)
        self._scorer = judge if isinstance(judge, Scorer) else None
        self._judge: Writer = self._writer if judge is None or self._scorer else judge  # type: ignore[assignment]
        self._stages = Stages.plain(options.search, options.stage_turns)
        self._scorers: dict[str, Scorer] = {}
        """The reward models of stages that name one (`Stage.judge`), by folder."""
        if options.stages:
            self._stages = Stages.read(options.stages)
            folders = {stage.judge for stage in self._stages.stages if stage.judge}
            self._scorers = {folder: FolderScorer(folder) for folder in sorted(folders)}
        self._seed = held_out.config.seed
        self._tasks = held_out.tasks[:: options.attempts]
        self._kept = KeptEpisodes()
        self._first = self._kept.episodes
        """The attempts of the first population, which have read no conclusions."""
        self._shown: dict[str, Mapping[int, str]] = {}
        """The text of each attempt that the judge read, by task and attempt."""

    async def run(self) -> AttemptResult:
        """Attempt the tasks, choose an attempt at each, and make the further attempts of the
        options.
        """
        options = self._options
        graded, choices = await self._population()
        tokens = {"attempts": _sampled(self._kept)}
        if options.votes:
            tokens["votes"] = self._writer.tokens
        chosen = {self._name_of_choice(): [self._success(task, choices) for task in self._tasks]}
        if self._head:
            plain = {task.key: self._majority(task, None) for task in self._tasks}
            name = f"majority of {options.attempts} answers"
            chosen[name] = [self._success(task, plain) for task in self._tasks]
        populations: dict[str, EvalResult] = {}
        latest, chosen_latest = self, choices
        for number in range(2, options.rounds + 2):
            name, before = f"population {number}", self._writer.tokens
            latest = await latest._next(chosen_latest)
            again, chosen_latest = await latest._population()
            populations[name] = EvalResult.of(again, options.attempts)
            chosen[f"{self._name_of_choice()}, {name}"] = [
                latest._success(task, chosen_latest) for task in self._tasks
            ]
            tokens[name] = _sampled(latest._kept) + self._writer.tokens - before
        if options.distil and not options.rounds:
            before = self._writer.tokens
            notes = await self._conclusions(choices)
            name = f"answer from {options.distil} attempts"
            chosen[name], tokens["distilled"] = await self._again(notes)
            tokens["distilled"] += self._writer.tokens - before
        if options.plan:
            before = self._writer.tokens
            plans = await self._plans()
            chosen[PLANNED], tokens["planned"] = await self._again(plans)
            tokens["planned"] += self._writer.tokens - before
        if number := len(self._stages.stages):
            name = f"search with {number} stages"
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
            populations=populations,
            chosen=chosen,
            judge=[each for each in records if each is not None],
            unread=asked.count(None) / len(asked) if asked else 0.0,
            tokens=tokens,
        )

    async def _population(self) -> tuple[list[bool | None], dict[str, Choice]]:
        """Attempt the tasks, and choose an attempt at each. Return successes and choices."""
        graded = await self._evaluate(self._rollout, self._held_out.tasks, self._kept)
        if isinstance(self._held_out.taskset, CollectedTasks):
            self._held_out.taskset.are_attempts = False
        return graded, await self._choose()

    async def _next(self, choices: Mapping[str, Choice]) -> "_Procedure":
        """Return the procedure of a new population, which reads the conclusions of the best
        attempts of this one. The seeds are those of this population, so that only the notes differ.
        """
        following = copy(self)
        following._rollout = self._noted(await self._conclusions(choices))
        following._kept, following._shown = KeptEpisodes(), {}
        return following

    def _noted(self, notes: Mapping[str, str]) -> Rollout:
        """Return a rollout of the tasks with `notes`, by task key, at the end of their prompts."""
        config, taskset = self._held_out.config, NotedTasks(self._held_out.taskset, notes)
        return build_rollout(config, taskset)(self._rollout.generator, taskset, config.rollout)

    def _name_of_choice(self) -> str:
        options = self._options
        if self._scorer:
            return f"best score of {options.attempts} attempts"
        if not options.votes:
            weighted = "weighted " if self._head else ""
            return f"{weighted}majority of {options.attempts} answers"
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
        """Make one more attempt at each task. Return their successes and the number of sampled
        tokens.

        `notes` has, by task key, a text that the policy reads first. The seeds are those of the
        first attempt, so that only the note differs.
        """
        kept = KeptEpisodes()
        return await self._evaluate(self._noted(notes), self._tasks, kept), _sampled(kept)

    async def _choose(self) -> dict[str, Choice]:
        """Return the choice at each task, by task key. Tasks without a finished attempt are left
        out.
        """
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
        numbers = sorted(self._episodes(task))
        if self._scorer:
            return await self._by_score(task, numbers)
        if not self._options.votes:
            return self._majority(task, self._head)
        texts = {number: await self._text(task, number) for number in numbers}
        self._shown[task.key] = texts
        return await self._tournament(task, texts) if texts else None

    def _majority(self, task: Task, head: QualityHead | None) -> Choice | None:
        """Return the choice by the attempts' answers, weighted by `head`. None if no attempt has an
        answer.
        """
        episodes = self._episodes(task)
        numbers = sorted(episodes)
        if not numbers:
            return None
        random = Random(derive_seed(self._seed, "choice", task.key))
        read = AnswerReader(self._held_out.taskset, self._rollout.generator.chat)
        weights = [head.chance(episodes[number]) for number in numbers] if head else None
        answers = [read(episodes[number]) for number in numbers]
        choice = by_majority(answers, random, weights)
        return Choice(tuple(numbers[place] for place in choice.ranking))

    async def _by_score(self, task: Task, numbers: Sequence[int]) -> Choice | None:
        """Return the ranking of attempts by the command of their last stage, then by score.

        Its comparisons are all pairs. None without an attempt.
        """
        episodes = self._episodes(task)
        found = await asyncio.gather(*(self._score(task, episodes[each]) for each in numbers))
        scores = dict(zip(numbers, found, strict=True))
        pairs = []
        for pair in combinations(numbers, 2):
            best = max(pair, key=lambda each: _rank(scores[each]))
            named = best if len({scores[each] for each in pair}) > 1 else None
            pairs.append(Comparison(pair, (named,), best))
        ranking = sorted(
            numbers, key=lambda each: (passed(episodes[each]), _rank(scores[each])), reverse=True
        )
        return Choice(tuple(ranking), tuple(pairs)) if ranking else None

    async def _score(self, task: Task, attempt: Trajectory, stage: int = 0) -> float | None:
        """Return the score of an attempt at the end of stage 1, 2, ..., or at its end."""
        chosen = self._stages.stages[stage - 1] if stage else None
        scorer = self._scorers.get(chosen.judge) if chosen else None
        scorer = scorer or self._scorer
        assert scorer, "AttemptOptions.check"
        chat, end, texts = self._rollout.generator.chat, 0, list[str]()
        for start, said in replies(attempt.pieces):
            text = chat.text(attempt.tokens[end : start + len(said)] if end else said)
            end = start + len(said)
            texts.append(text)
        name = chosen.name if chosen else ""
        return await scorer.score(self._words(task), texts, name)

    async def _tournament(self, task: Task, texts: Mapping[int, str], *place: int) -> Choice:
        """Return the policy's ranking of `texts`, which have the numbers of the attempts as keys.

        `place` makes the seeds of one stage of a search differ from those of another.
        """
        options = self._options

        async def ask(attempts: Sequence[int], vote: int) -> int | None:
            letters = dict(zip(ascii_uppercase, attempts, strict=False))
            seed = derive_seed(self._seed, "vote", *place, task.key, *sorted(attempts), vote)
            shown = {letter: texts[number] for letter, number in letters.items()}
            shown = {"task": self._words(task), **shown}
            prompt = question(self._rollout.generator, COMPARE, shown)
            verdict = await self._judge.reply((Message("user", prompt),), seed)
            return letters.get(read_letter(verdict))

        random = Random(derive_seed(self._seed, "choice", *place, task.key))
        return await by_tournament(
            list(texts), ask, votes=options.votes, group=options.group, random=random
        )

    async def _text(self, task: Task, number: int) -> str:
        """Return the text of an attempt that the policy compares: its last reply, or a summary."""
        episode = self._episodes(task)[number]
        if not self._options.summaries:
            return self._last_reply(episode)
        return await self._summary(task, number, self._whole(episode))

    async def _summary(self, task: Task, number: int, rest: str) -> str:
        """Return the policy's summary of an attempt with the text `rest`.

        A text that does not fit into the context is summarised in parts, each with the summary of
        the parts before it. Only if the task leaves no room beside it, the end is summarised.
        """
        instructions, texts, part = SUMMARISE, {"task": self._words(task)}, 0
        while True:
            size = room(self._rollout.generator, instructions, texts, rest) or len(rest)
            seed = derive_seed(self._seed, "summary", task.key, number, part)
            written = await self._writer.write(instructions, seed, **texts, attempt=rest[:size])
            if not (rest := rest[size:]):
                return written
            instructions, part = SUMMARISE + GO_ON, part + 1
            texts = {**texts, "earlier": written}

    async def _conclusions(self, choices: Mapping[str, Choice]) -> dict[str, str]:
        """Return a note with the conclusions of the best attempts at each task, by task key.

        They are the texts that the policy compared. A note has at most about `engine.max_context`
        characters, so that it fits into the context.
        """
        most = self._held_out.config.engine.max_context // self._options.distil

        async def note(task: Task) -> str:
            ranking = choices[task.key].ranking if task.key in choices else ()
            shown = self._shown.get(task.key, {})
            best = ranking[: self._options.distil]
            texts = [shown.get(each) or await self._text(task, each) for each in best]
            lines = [f"{number}. {text[-most:]}" for number, text in enumerate(texts, 1)]
            return "\n".join([CONCLUSIONS, *lines]) if lines else ""

        async with asyncio.TaskGroup() as running:
            asked = {task.key: running.create_task(note(task)) for task in self._tasks}
        return {key: each.result() for key, each in asked.items()}

    async def _search(self) -> tuple[list[bool | None], int]:
        """Search at each task. Return the successes of the best candidates, and the sampled tokens.

        The tokens include those of the policy's votes.
        """
        options, before = self._options, self._writer.tokens
        stages, ends = self._stages.stages, self._stages.ends
        places = asyncio.Semaphore(max(1, evaluation.MAX_CONCURRENT // options.attempts))
        sampled = done = 0
        self._progress("searches", done=0, total=len(self._tasks))

        async def one(task: Task) -> bool | None:
            nonlocal sampled, done
            made = StagedAttempts(self._rollout, task, derive_seed(self._seed, "search"), ends=ends)

            async def rank(candidates: Sequence[Trajectory], stage: int) -> Sequence[Trajectory]:
                if self._scorer or stages[stage - 1].judge:
                    scores = await asyncio.gather(
                        *(self._score(task, each, stage) for each in candidates)
                    )
                    order = sorted(range(len(scores)), key=lambda i: -_rank(scores[i]))
                else:
                    texts = {number: self._whole(each) for number, each in enumerate(candidates)}
                    choice = await self._tournament(task, texts, len(candidates))
                    order = [*choice.ranking]
                if stages[stage - 1].run:
                    order.sort(key=lambda i: -passed(candidates[i]))
                return [candidates[i] for i in order]

            async with places:
                best = await beam_search(
                    made.extend,
                    rank,
                    stages=len(stages),
                    width=options.attempts,
                    beam=options.beam,
                )
            sampled, done = sampled + made.tokens, done + 1
            self._progress("searches", done=done, total=len(self._tasks))
            return best.success if best else None

        async with asyncio.TaskGroup() as running:
            asked = [running.create_task(one(task)) for task in self._tasks]
        return [each.result() for each in asked], sampled + self._writer.tokens - before

    async def _plans(self) -> dict[str, str]:
        """Return a note with a plan from the first attempt at each task, by task key, or ""."""

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
        """Return the finished attempts at a task, by their numbers."""
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

    def _success(self, task: Task, choices: Mapping[str, Choice | None]) -> bool | None:
        """Return whether the chosen attempt at a task succeeded. None if none was finished."""
        choice = choices.get(task.key)
        return self._episodes(task)[choice.ranking[0]].success if choice else None

    def _words(self, task: Task) -> str:
        """Return the text of a task, or else the prompt of its first attempt."""
        numbers = range(self._options.attempts)
        found = (self._first.get((task.key, number)) for number in numbers)
        opening = next((each.pieces[0].tokens for each in found if each), ())
        return task_text(self._held_out.taskset, task) or self._rollout.generator.chat.text(opening)

    def _whole(self, episode: Trajectory) -> str:
        return self._rollout.generator.chat.text(episode.tokens)

    def _last_reply(self, episode: Trajectory) -> str:
        """Return the text of an episode's last reply, or its tool calls if it has no text."""
        reply = last_reply(episode, self._rollout.generator.chat)
        calls = [f"{each.name} {json.dumps(dict(each.arguments))}" for each in reply.tool_calls]
        return reply.content or "\n".join(calls)


def read_letter(verdict: str) -> str:
    """Return the letter that a verdict names as the best attempt, or "".

    >>> read_letter("B errs. Best: A"), read_letter("C."), read_letter("A or B")
    ('A', 'C', '')
    """
    named = _VERDICT.findall(verdict)
    if named:
        return str(named[-1]).upper()
    alone = verdict.strip(" \n.*()[]:'\"").upper()
    return alone if len(alone) == 1 and alone in ascii_uppercase else ""


def _rank(score: float | None) -> float:
    """Return a score as a number for sorting. None becomes a number below all scores."""
    return -inf if score is None else score


def _sampled(kept: KeptEpisodes) -> int:
    return sum(each.num_sampled_in_all for each in kept.episodes.values())
