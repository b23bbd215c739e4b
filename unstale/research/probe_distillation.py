"""The command `probe-distillation`: measure whether distillation raises success.

A prefix is the beginning of a saved episode of a run. The environment is played again up to the
prefix, as in a resumed run, and the student continues from there.
"""

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any, Literal, NoReturn

import torch
from rich.table import Table
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from unstale.builders import build_rollout, build_sampler, ends_freely, load_policy
from unstale.builders.sampling import build_chat
from unstale.cli.evaluate import run_until_complete, running_generator
from unstale.cli.process import limit_threads
from unstale.cli.trained import policy_folder
from unstale.config import ConfigError, RunConfig
from unstale.durability.console import Console
from unstale.durability.journal import Journal, JournalReader
from unstale.envs import Taskset
from unstale.envs.registry import build_taskset
from unstale.model.policy import Policy
from unstale.observe.live import LiveDisplay
from unstale.records import EpisodeRecord, Failure, Piece, Sampled, Task, Trajectory
from unstale.research.alignment import (
    cosine,
    forward_kl_direction,
    reverse_kl_direction,
    success_direction,
    teacher_advantage,
)
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
from unstale.rollout.lessons import Lessons
from unstale.rollout.seeds import derive_seed
from unstale.techniques.distil import SELF, DistilConfig

CLASSES = {True: "correct", False: "incorrect"}
"""The names of the two classes of saved episodes, by success."""
WARNED_SHARE = 0.02
"""Share of failed rollouts above which a warning is printed, because the results leave them out."""
FIGURES = ("forward", "reverse", "advantage", "agreement", "student_share", "teacher_share")
QUESTION_FIGURES = FIGURES[:4]
"""The figures of each task that the terminal shows."""
Positions = int | Literal["one", "windows"]
"""Which sampled tokens of an episode are measured: one random one, a random one in each window of
1, 2, 4, ... tokens, so that their number grows with the logarithm of the episode's length, or with
a number N every N-th one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """The options of the command `probe-distillation`."""

    prefixes: int = 32
    rollouts: int = 8
    top: int = 4
    student: str = ""
    """Model folder of the student, the policy that would be trained. Empty means
    the run's policy.
    """
    contexts: tuple[str, ...] = ("",)
    """Texts that only the teacher reads, as `distil.context`. Each is measured, and they are
    compared.
    """
    positions: Positions = "one"
    """Which sampled tokens of an episode are measured."""

    def __post_init__(self) -> None:
        if self.prefixes < 2 or self.rollouts < 2 or self.rollouts % 2 or self.top < 1:
            raise ConfigError(
                "--prefixes must be >= 2, --rollouts even and >= 2 and --top >= 1, got "
                f"{self.prefixes}, {self.rollouts} and {self.top}"
            )
        if isinstance(self.positions, int) and self.positions < 1:
            raise ConfigError(
                f"--positions must be one, all, windows or >= 1, got {self.positions}"
            )


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a saved episode, up to a sampled token, which is not part of it."""

    task: Task
    env_seed: int
    episode: int
    pieces: tuple[Piece, ...]
    success: bool
    """True if the saved episode succeeded."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces for token in piece.tokens)

    def extended(self, token: int) -> tuple[Piece, ...]:
        """Return the pieces (runs of tokens) of the prefix, followed by the
        sampled token `token`.
        """
        return (*self.pieces, Sampled((token,), (0.0,), version=0))


@dataclass(frozen=True, slots=True)
class Candidates:
    """K candidates for the token after a prefix, with their log-probabilities `[K]` for both
    policies.
    """

    tokens: tuple[int, ...]
    student_logp: Tensor
    teacher_logp: Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean, its standard error (NaN for fewer than two values) and the number of values."""

    value: float
    error: float
    number: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Return the mean of the values that are not NaN."""
        known = [each for each in values if not math.isnan(each)]
        error = stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan
        return cls(fmean(known) if known else math.nan, error, len(known))

    def __str__(self) -> str:
        return f"{self.value:z.3f} ± {self.error:.3f} ({self.number})"


@dataclass(frozen=True, slots=True)
class Alignment:
    """The results for one teacher's text, separately for prefixes of successful and failed
    episodes.
    """

    figures: Mapping[str, Mapping[str, Mean]]
    """Means over episodes, by class of the episode (success or failure), then by name. The value of
    an episode is the mean of its prefixes.

    Each cosine compares two directions of change of the student's logits. `forward` and `reverse`
    compare the direction that raises success with those of the two distillation losses. `advantage`
    is the success rate after the teacher's next token minus that after the student's. `agreement`
    compares the directions that raise success by two halves of the rollouts. `student_share` and
    `teacher_share` are the total probability of the candidates under each policy.
    """
    indifferent: Mapping[str, int]
    """For each class of episodes: the number of prefixes at which every candidate has the same
    success rate, so that no direction raises success.
    """
    episodes: int
    failed: int
    """Number of rollouts whose environment failed. The results leave them out."""
    sampled_tokens: int
    seconds: float
    rows: tuple[Mapping[str, Any], ...] = ()
    """A row for each prefix: the `task` and the number of the `episode`, the `position`, which is
    the number of tokens before the candidates, the class `kind`, and for each candidate its token,
    text, two log-probabilities and success rate, which is None if no episode finished. Then the
    figures of `figures`, which are None where they are not defined.
    """
    questions: tuple[Mapping[str, Any], ...] = ()
    """A row for each task: its key `task`, the number of `positions` that were measured, and the
    means over them of `FIGURES`, which are None where they are not defined.
    """
    context: str = ""
    """The text that only the teacher reads; empty for none."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> Table:
        """Return a table of the results for the terminal."""
        table = Table("figure", *CLASSES.values())
        for name in FIGURES:
            table.add_row(name, *(str(self.figures[each][name]) for each in CLASSES.values()))
        counts = (str(self.indifferent[each]) for each in CLASSES.values())
        table.add_row("prefixes without a direction", *counts)
        return table

    def question_table(self) -> Table:
        """Return a table of the results for each task, for the terminal."""
        table = Table("task", "positions", *QUESTION_FIGURES)
        for row in self.questions:
            known = [row[name] for name in QUESTION_FIGURES]
            shown = ["" if each is None else f"{each:z.3f}" for each in known]
            table.add_row(row["task"], str(row["positions"]), *shown)
        return table

    def cost(self) -> str:
        """Return a text with the numbers of episodes and of sampled tokens, and the duration in
        seconds.
        """
        failed = f", {self.failed} failed" if self.failed else ""
        return (
            f"{self.episodes} episodes{failed}, {self.sampled_tokens} sampled tokens, "
            f"{self.seconds:.0f} s"
        )


def probe_distillation(
    run: Path,
    teacher: str,
    config: RunConfig,
    options: ProbeOptions,
    *,
    console: Console | None = None,
) -> list[Alignment]:
    """Measure whether distillation from a teacher would raise a student's success.

    Return a result for each text of `options.contexts`, all from the same prefixes, tokens and
    episodes. With a policy as its own teacher, they show which text to use.

    Prefixes are the beginnings of finished episodes in the journal of `run`, half of them successes
    if there are enough, up to each of the `positions`. At each prefix, the `top` most probable next
    tokens of the teacher and of the student are tried, with `rollouts` episodes of the student for
    each token. A result compares the changes of the token probabilities that raise success with
    those that distillation would make.

    Raises `ConfigError` before any episode if a model cannot score sequences of
    `engine.max_context` tokens, if the tokenizers of the two differ, if an external agent calls the
    policy, if `engine.logit_bias` is set (the two models are compared as they are), or if the
    journal has no finished episode. It is also raised if an environment cannot be played again up
    to a prefix. Raises `RunFailed` if a component fails.
    """
    console = console or Console(soft_wrap=True)
    if config.engine.logit_bias:
        raise ConfigError(
            "probe-distillation is not built with engine.logit_bias, as the technique distil is "
            "not: set --engine.logit_bias ''"
        )
    began = time.monotonic()
    limit_threads()
    config = replace(
        config.with_policy(options.student or policy_folder(run)),
        # A repeated episode would begin anew, without the prefix.
        rollout=replace(config.rollout, retries=0),
    )
    with Journal.read(run) as journal:
        random = Random(f"align/{config.seed}")
        prefixes = choose_prefixes(journal, options.prefixes, random, options.positions)
    teaching = load_policy(config.with_policy(teacher), trained=False)
    teaching.check_length(config.engine.max_context)
    temperature = config.engine.temperature
    texts = _with_contexts(config, teaching, prefixes, options.contexts)
    taught = [_next_logps(teaching, each, temperature) for each in zip(*texts, strict=True)]
    vocabulary = teaching.tokenizer.get_vocab()
    del teaching
    policy, taskset, generator = build_sampler(config)
    policy.check_length(config.engine.max_context)
    if ends_freely(taskset):
        raise ConfigError(
            f"probe-distillation cannot use {config.task.env}: an external agent cannot be "
            "started again in the middle of an episode"
        )
    if policy.tokenizer.get_vocab() != vocabulary:
        raise ConfigError(
            f"the tokenizers of {teacher} and {config.model} differ: distillation needs the same "
            "tokens"
        )
    size = len(policy.tokenizer)
    own = _next_logps(policy, [prefix.tokens for prefix in prefixes], temperature)
    candidates = [
        choose_candidates(student[:size], [each[:size] for each in of_teachers], options.top)
        for student, *of_teachers in zip(own, *taught, strict=True)
    ]
    tried = [each[0] for each in candidates]
    total = options.rollouts * sum(len(each.tokens) for each in tried)
    num_episodes = len({prefix.episode for prefix in prefixes})
    console.print(
        f"{len(prefixes)} prefixes of {num_episodes} episodes, {total} episodes to play from there",
        highlight=False,
    )

    async def play_all() -> list[list[list[Trajectory | Failure]]]:
        async with running_generator(config, policy, generator) as running:
            rollout = _rollout(config, taskset, running)
            with LiveDisplay(config, console=console) as display:
                async with rollout.resources:
                    return await _play(rollout, prefixes, tried, options, config, display)

    played = run_until_complete(play_all())
    seconds = time.monotonic() - began
    results = []
    for context, view in zip(options.contexts, zip(*candidates, strict=True), strict=True):
        rows = _rows(prefixes, view, played, policy.tokenizer)
        means = _figures(prefixes, view, played, seconds=seconds)
        results.append(replace(means, rows=rows, questions=_questions(rows), context=context))
    found = results[0]
    if found.failed > WARNED_SHARE * found.episodes:
        console.print(
            f"[yellow]warning:[/] {found.failed / found.episodes:.0%} of the rollouts failed. The "
            "figures leave them out, so they may be wrong if failures depend on the tokens",
            highlight=False,
        )
    return results


def _with_contexts(
    config: RunConfig, teacher: Policy, prefixes: Sequence[Prefix], contexts: Sequence[str]
) -> list[list[tuple[int, ...]]]:
    """For each prefix, return its tokens with each of the texts in its prompt."""
    if not any(contexts):
        return [[each.tokens] * len(contexts) for each in prefixes]
    taskset = build_taskset(config.task)
    chat = build_chat(config, teacher.tokenizer, teacher.ends, taskset)
    lessons = [
        Lessons(DistilConfig(teacher=SELF, context=text), taskset, chat) if text else None
        for text in contexts
    ]
    return [[_placed(each, prefix) for each in lessons] for prefix in prefixes]


def _placed(lessons: Lessons | None, prefix: Prefix) -> tuple[int, ...]:
    """Return the tokens of a prefix, with the text of `lessons` in its prompt."""
    if lessons is None:
        return prefix.tokens
    first = next(
        (place for place, each in enumerate(prefix.pieces) if isinstance(each, Sampled)), None
    )
    prompt = [token for piece in prefix.pieces[:first] for token in piece.tokens]
    return (*lessons.with_text(prefix.task, prompt), *prefix.tokens[len(prompt) :])


def _next_logps(
    policy: Policy, prefixes: Sequence[Sequence[int]], temperature: float
) -> list[Tensor]:
    """Return the log-probability `[V]` of every next token after each prefix.

    Prefixes of the same episode follow one another, from the shortest on. They are computed in one
    forward pass.
    """
    found: list[Tensor] = []
    while (begin := len(found)) < len(prefixes):
        end = begin + 1
        while end < len(prefixes) and _is_longer(prefixes[end], prefixes[end - 1]):
            end += 1
        lengths = [len(each) for each in prefixes[begin:end]]
        found += policy.logps_after(prefixes[end - 1], lengths, temperature=temperature)
    return found


def _is_longer(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) > len(other) and one[: len(other)] == other


def choose_prefixes(
    journal: JournalReader, number: int, random: Random, positions: Positions = "one"
) -> list[Prefix]:
    """Return beginnings of `number` different finished episodes, each up to a random sampled token.

    An episode can have several `positions`, and then several beginnings, from the shortest on. Half
    of the episodes are successes, as far as the journal has enough. Episodes with several
    conversations are left out. The result is shorter if the journal has fewer episodes. Raises
    `ConfigError` if it has none.
    """
    seeds = {row.number: row.seed for row in journal.groups()}
    kept: dict[bool, list[tuple[Trajectory, int]]] = {True: [], False: []}
    seen = {True: 0, False: 0}
    for stored in journal.trajectories():
        item = stored.trajectory
        has_note = item.fork is not None and bool(item.fork.note)
        if item.branches or not item.num_sampled or has_note or item.stop == "pruned":
            continue
        sample, place = kept[item.success], seen[item.success]
        seen[item.success] += 1
        if place < number:  # a sample of unknown size without replacement
            sample.append((item, seeds[stored.group]))
        elif (place := random.randrange(place + 1)) < number:
            sample[place] = (item, seeds[stored.group])
    if not any(seen.values()):
        raise ConfigError(f"{journal.path} has no finished episode to take prefixes from")
    correct = min(len(kept[True]), max(number // 2, number - len(kept[False])))
    chosen = {True: correct, False: number - correct}
    return [
        _cut(item, seed, place)
        for success, sample in kept.items()
        for item, seed in random.sample(sample, min(chosen[success], len(sample)))
        for place in _places(item.num_sampled, positions, random)
    ]


def _places(num_sampled: int, positions: Positions, random: Random) -> Sequence[int]:
    """Return the indices, among an episode's sampled tokens, at which success is measured."""
    if isinstance(positions, int):
        # The first is random, so that each token is measured with the same probability.
        return range(random.randrange(min(positions, num_sampled)), num_sampled, positions)
    if positions == "windows":
        windows = [(1 << i) - 1 for i in range(num_sampled.bit_length())]
        ends = [*windows[1:], num_sampled]
        pairs = zip(windows, ends, strict=True)
        return [random.randrange(start, end) for start, end in pairs if start < end]
    return [random.randrange(num_sampled)]


def _cut(item: Trajectory, seed: int, left: int) -> Prefix:
    """Return the beginning of an episode up to sampled token number `left`, which is left out."""
    pieces: list[Piece] = []
    for piece in item.pieces:
        if isinstance(piece, Sampled):
            if left < len(piece.tokens):
                if left:
                    logps = piece.behavior_logp[:left]
                    pieces.append(replace(piece, tokens=piece.tokens[:left], behavior_logp=logps))
                break
            left -= len(piece.tokens)
        pieces.append(piece)
    env_seed = derive_seed(seed, item.task.key)
    return Prefix(item.task, env_seed, item.episode, tuple(pieces), item.success)


def choose_candidates(
    student_logp: Tensor, teacher_logps: Sequence[Tensor], top: int
) -> list[Candidates]:
    """Return the candidates for the next token, one result for each teacher.

    The candidates are the `top` most probable tokens of the student and of every teacher, so all
    results have the same tokens. The arguments are log-probabilities `[V]`. Tokens that are
    impossible for one of the policies are left out.
    """
    every = torch.stack([student_logp, *teacher_logps])
    possible = every.isfinite().all(0).nonzero().squeeze(1)
    found: dict[int, None] = {}
    for logp in every[:, possible]:
        best = logp.topk(min(top, len(logp))).indices
        found |= dict.fromkeys(possible[best].tolist())
    tokens = tuple(found)
    index = torch.tensor(tokens, dtype=torch.long)
    return [
        Candidates(tokens, student_logp[index].double(), each[index].double())
        for each in teacher_logps
    ]


def _rollout(config: RunConfig, taskset: Taskset, generator: Generator) -> Rollout:
    def refuse(episode: int, failure: Failure) -> NoReturn:
        raise ConfigError(
            f"{failure.task.key} cannot be played again up to a saved prefix ({failure.stage}: "
            f"{failure.error}). The environment must answer the same replies equally, and the "
            "options of the task must be those of the run"
        )

    make = build_rollout(config, taskset)
    return make(generator, taskset, config.rollout, on_restart=refuse)


async def _play(  # noqa: PLR0913 - two of them are options
    rollout: Rollout,
    prefixes: Sequence[Prefix],
    candidates: Sequence[Candidates],
    options: ProbeOptions,
    config: RunConfig,
    display: LiveDisplay,
) -> list[list[list[Trajectory | Failure]]]:
    """Return the outcomes of the episodes, by prefix, candidate token and rollout.

    At most as many episodes run concurrently as in a training run.
    """
    schedule = config.schedule
    num_tickets = (schedule.max_staleness + 1) * schedule.groups_per_step
    free = asyncio.Semaphore(num_tickets * schedule.group_size)
    num_done, total = 0, options.rollouts * sum(len(each.tokens) for each in candidates)

    async def play(prefix: Prefix, token: int, index: int) -> Trajectory | Failure:
        nonlocal num_done
        record = EpisodeRecord(rollout.next_episode(), prefix.extended(token), None)
        place = len(prefix.tokens)
        noise = derive_seed(config.seed, "align", prefix.episode, place, token, index)
        async with free:
            outcome = await rollout.episode(
                prefix.task, env_seed=prefix.env_seed, noise_seed=noise, record=record
            )
        num_done += 1
        display.phase("episodes from the prefixes", done=num_done, total=total)
        return outcome

    async with asyncio.TaskGroup() as group:
        running = [
            [
                [group.create_task(play(prefix, token, index)) for index in range(options.rollouts)]
                for token in each.tokens
            ]
            for prefix, each in zip(prefixes, candidates, strict=True)
        ]
    return [[[task.result() for task in row] for row in rows] for rows in running]


def _figures(
    prefixes: Sequence[Prefix],
    candidates: Sequence[Candidates],
    played: Sequence[Sequence[Sequence[Trajectory | Failure]]],
    *,
    seconds: float,
) -> Alignment:
    rows: dict[str, dict[int, list[Mapping[str, float]]]] = {name: {} for name in CLASSES.values()}
    sampled = 0
    for prefix, each, outcomes in zip(prefixes, candidates, played, strict=True):
        of_kind = rows[CLASSES[prefix.success]]
        of_kind.setdefault(prefix.episode, []).append(_of_prefix(each, outcomes))
        before = sum(len(piece.tokens) for piece in prefix.pieces if isinstance(piece, Sampled))
        ended = [one for row in outcomes for one in row if isinstance(one, Trajectory)]
        sampled += sum(one.num_sampled - before - 1 for one in ended)
    ends = list(_flat(played))
    return Alignment(
        figures={
            kind: {
                name: Mean.of(
                    [Mean.of([row[name] for row in each]).value for each in found.values()]
                )
                for name in FIGURES
            }
            for kind, found in rows.items()
        },
        indifferent={
            kind: sum(row["indifferent"] == 1 for each in found.values() for row in each)
            for kind, found in rows.items()
        },
        episodes=len(ends),
        failed=sum(isinstance(one, Failure) for one in ends),
        sampled_tokens=sampled,
        seconds=seconds,
    )


def _rows(
    prefixes: Sequence[Prefix],
    candidates: Sequence[Candidates],
    played: Sequence[Sequence[Sequence[Trajectory | Failure]]],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[Mapping[str, Any], ...]:
    """Return the results of each prefix, as `Alignment.rows` has them."""
    rows = []
    for prefix, each, outcomes in zip(prefixes, candidates, played, strict=True):
        tried = zip(each.tokens, each.student_logp, each.teacher_logp, outcomes, strict=True)
        found = [
            {
                "token": token,
                "text": str(tokenizer.decode([token])),
                "student_logp": float(student),
                "teacher_logp": float(teacher),
                "success_rate": _or_none(_rate(ended)),
            }
            for token, student, teacher, ended in tried
        ]
        figures = _of_prefix(each, outcomes)
        row = {
            "task": prefix.task.key,
            "episode": prefix.episode,
            "position": len(prefix.tokens),
            "kind": CLASSES[prefix.success],
            "candidates": found,
        }
        rows.append(row | {name: _or_none(figures[name]) for name in FIGURES})
    return tuple(rows)


def _questions(rows: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the means of `rows` by task, as `Alignment.questions` has them."""
    by_task: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(row)
    found = []
    for task, of_task in by_task.items():
        known = {name: [row[name] for row in of_task if row[name] is not None] for name in FIGURES}
        means = {name: fmean(each) if each else None for name, each in known.items()}
        found.append({"task": task, "positions": len(of_task), **means})
    return tuple(found)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _flat(
    played: Sequence[Sequence[Sequence[Trajectory | Failure]]],
) -> Iterator[Trajectory | Failure]:
    for rows in played:
        for row in rows:
            yield from row


def _of_prefix(
    each: Candidates, outcomes: Sequence[Sequence[Trajectory | Failure]]
) -> Mapping[str, float]:
    """Return the results for one prefix, by name. `outcomes` has a row for each candidate token.

    The cosines are NaN if a candidate has no finished episode.
    """
    whole, first, second = (
        torch.tensor([_rate(row[part]) for row in outcomes], dtype=torch.float64)
        for part in (slice(None), slice(0, None, 2), slice(1, None, 2))
    )
    success = success_direction(each.student_logp, whole)
    distilled = (
        forward_kl_direction(each.student_logp, each.teacher_logp),
        reverse_kl_direction(each.student_logp, each.teacher_logp),
    )
    halves = (success_direction(each.student_logp, half) for half in (first, second))
    return {
        "forward": float(cosine(success, distilled[0])),
        "reverse": float(cosine(success, distilled[1])),
        "advantage": float(teacher_advantage(each.student_logp, each.teacher_logp, whole)),
        "agreement": float(cosine(*halves)),
        "student_share": float(each.student_logp.exp().sum()),
        "teacher_share": float(each.teacher_logp.exp().sum()),
        "indifferent": float(whole.unique().numel() == 1),
    }


def _rate(outcomes: Sequence[Trajectory | Failure]) -> float:
    """Return the share of successes among the finished episodes. NaN if none has finished."""
    ended = [one.success for one in outcomes if isinstance(one, Trajectory)]
    return fmean(ended) if ended else math.nan
