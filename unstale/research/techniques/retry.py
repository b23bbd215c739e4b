"""`retry`: finished attempts are tried again from a place, or with advice, that a rule finds.

`reflect`: the policy reads an attempt, and writes a JSON object with advice and the number of the
earliest reply to change. The retry is forked before that reply, which begins with the advice. For
training, the advice is removed: what was sampled after it becomes REWRITTEN text (sampled in
another context), and is trained on where its advantage is above 0. The replies before the fork have
the advantage 0 in the retry and, unless `train_shared`, in the attempt. The advantage of a success,
if positive, is 1, and other positive advantages are multiplied by `amplify`. Written advice has the
advantage 1 if its retry did better than the attempt, else 0. From R3L.
`plan`: the policy writes a plan from an attempt, successful or not, without its reward. The next
attempt has the plan at the end of its prompt, and is trained on as it was sampled. Attempts with
and without a plan are compared only among themselves, and a plan has the advantage of the attempt
that read it. From SAGE's plans, as in `unstale attempt --plan`.
`correct`: in a failed attempt, the first wrong step is found, and a right one is put in its place,
which is FOREIGN text (written by no policy of the run). The policy continues from there. This is
repeated until the attempt succeeds, at most `steps` times. The `judge` finds the step: a process
reward model, which scores every step, a served model or a function. The `corrector` writes the
right one: a stronger model, which reads the attempt up to there, or a function. Without them the
task set does both. By default it takes the first reply that differs from the task's demonstration,
and the demonstration's reply in its place. From SCOPE.
`clean`: the first call that failed is replaced by the call of the next reply without an error in
the same attempt, as REWRITTEN text, and the policy continues from there, without the error in its
context. If both calls are similar, the text before the first one stays; otherwise the whole reply
is replaced. If the next reply without an error has no call, the attempt stays as it is. From
CLEANER.

With `correct` and `clean`, the replies before a fork have the advantage of the attempt that
continues from it. The replies after it in the first attempt keep their advantage (`correct`), or
have 0 (`clean`). An advantage is the reward minus the mean reward of the group, for `clean` without
attempts that were continued.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import cycle, islice
from math import sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from unstale.config.checks import ConfigError, Count, Range, Section, Share, is_served
from unstale.config.techniques import Entry, refuse_slots, require_value
from unstale.records import (
    Edit,
    Failure,
    Fork,
    Group,
    Placed,
    Provenance,
    Sampled,
    ScoredTrajectory,
    Trajectory,
    replies,
    walk,
)
from unstale.research.served_writer import DATA
from unstale.research.techniques.hints import check_number, complete_number, of_tokens
from unstale.research.techniques.tree import check_sequences, refuse_kept_sets
from unstale.rewriting import remove_text
from unstale.rollout.seeds import derive_seed
from unstale.techniques.hooks import CreditContext, Texts

if TYPE_CHECKING:
    from unstale.config import RunConfig
    from unstale.research.steps import FolderCorrector, Step, StepJudge, TextCorrector

REFLECT = (
    """You read an attempt at a task that {ended}, with its steps numbered. """
    + DATA
    + """ \
Find the earliest step that should be done differently. Answer with one JSON object and nothing \
else: {{"cause": "<what went wrong>", "advice": "<what to do at that step>", "step": <its number>}}\
{unless}"""
)
UNLESS = """. If the attempt needs no change, the step is 0."""
PLAN = f"""You write a short plan for a task, from what an attempt at it shows: the steps, and \
what to avoid. Do not give the answer. {DATA}"""
PLANNED_BY = "A plan, from an earlier attempt:"
ADVICE = "Note: {advice}\n"
REFUSED = {
    "allocator": "which chooses the number of episodes of a group, too",
    "distiller": "which is not built with it, because a teacher scores sampled tokens only",
    "estimator": "which computes the advantages, too",
    "filter": "which may leave out an attempt that retries are compared with",
    "limiter": "which counts the replies of an episode from its beginning",
    "ratio": "which is computed over whole sequences",
    "recredit": "which compares replies, of which retries have some twice",
    "source": "which stores single episodes",
}
"""Reasons why techniques of some slots (kinds of techniques) cannot be used with
retries, by slot.
"""
Rounds = Sequence[Sequence[Trajectory | Failure]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig(Section):
    """Further attempts that start in the middle of earlier ones, or from a text
    about them (R3L).
    """

    selector: ClassVar[str] = "rule"
    read_by: ClassVar[Mapping[str, Sequence[str]]] = {
        "attempts": ("reflect",),
        "amplify": ("reflect",),
        "train_shared": ("reflect",),
        "train_texts": ("reflect", "plan"),
        "judge": ("correct",),
        "corrector": ("correct",),
        "step": ("correct",),
        "threshold": ("correct",),
        "until": ("correct",),
        "steps": ("correct", "clean"),
        "similarity": ("clean",),
        "error": ("clean",),
    }

    rule: Literal["reflect", "plan", "correct", "clean"] = "reflect"
    """The change that a retry makes to an attempt. `reflect` adds advice that the policy wrote,
    `plan` a plan that it wrote. `correct` replaces a wrong reply by a right one of the task set.
    `clean` replaces a failed call by a later call of the same attempt.
    """
    number: Count = 0
    """Largest number of attempts of a group that are tried again; 0 is half of
    `schedule.group_size`.
    """
    attempts: Literal["failed", "all"] = "failed"
    """Only for `reflect`: the attempts about which advice is written. R3L takes all."""
    amplify: Annotated[float, Range(1, 100)] = 3.0
    """Only for `reflect`: factor of positive advantages. Positive advantages of successes are 1
    instead.
    """
    train_shared: bool = False
    """Only for `reflect`: also train on the replies of an attempt before the place where its retry
    starts.
    """
    train_texts: bool = False
    """Only for `reflect` and `plan`: also train on the written advice or plans, as R3L does."""
    steps: Count = 3
    """Only for `correct` and `clean`: largest number of replies or steps of an attempt that are
    replaced. 0 sets no limit.
    """
    judge: str = ""
    """Only for `correct`: what finds the first wrong step. The folder of a process reward model
    (an `AutoModelForTokenClassification` with two labels, or an
    `AutoModelForSequenceClassification` with one), the address of a server (`http://...`) with a
    chat model, or a function `module:function` of the task's text and the steps, which returns an
    index or None. Empty: the task set.
    """
    corrector: str = ""
    """Only for `correct`: what writes the right step. The folder of a language model with the
    policy's tokenizer, the address of a server with a chat model, or a function `module:function`
    of the task's text, the right steps and the wrong one, which returns a text. Empty: the task
    set.
    """
    step: Literal["paragraph", "line", "reply"] = "paragraph"
    """Only for `corrector`: what a step is: a part of a reply that ends with an empty line
    (`paragraph`) or a line end (`line`), or a whole reply. A reply with tool calls is one step.
    """
    threshold: Share = 0.5
    """Only for a `judge` that is a process reward model: the first step with a lower score is the
    wrong one.
    """
    until: Literal["step", "end"] = "step"
    """Only for `corrector`: it writes one step, or all to the end of the reply."""
    similarity: Share = 0.5
    """Only for `clean`: if the similarity of the two calls (by `difflib`) is at least this, the
    text before the first call stays.
    """
    error: str = "(?i)error:"
    """Only for `clean`: a regular expression that finds an error in the result of a call."""

    def check_combination(self) -> None:
        try:
            re.compile(self.error)
        except re.error as error:
            raise ConfigError(
                f"retry.error {self.error!r} is no regular expression: {error}"
            ) from None
        if self.judge and not self.corrector:
            raise ConfigError("retry.judge needs retry.corrector, which writes the right step")
        if not self.corrector and (self.step, self.until) != ("paragraph", "step"):
            raise ConfigError("retry.step and retry.until are used only with retry.corrector")

    @property
    def is_sampled(self) -> bool:
        """True if the corrector's log-probabilities are known: it is a model in a folder."""
        from unstale.research.steps import is_function

        return bool(self.corrector) and not (
            is_served(self.corrector) or is_function(self.corrector)
        )


class Retry:
    """A technique that tries finished attempts again, each changed by a rule."""

    def __init__(self, options: RetryConfig) -> None:
        """Create the technique. `options.number` must be above 0: `Entry.complete` replaces a 0."""
        self._options = options
        self._judge: StepJudge | None = None
        self._corrector: TextCorrector | FolderCorrector | None = None
        self.asks_others = bool(options.corrector)

    def prepare(self, texts: Texts) -> None:
        """Load judge and corrector. Raises `ConfigError` for one that is unusable."""
        from unstale.research.steps import make_corrector, make_judge

        options = self._options
        if options.judge:
            self._judge = make_judge(options.judge, options.threshold)
        self._corrector = make_corrector(options.corrector, texts, to_end=options.until == "end")

    def roots(self, group_size: int) -> int:
        return group_size - self._options.number

    async def forks(self, rounds: Rounds, texts: Texts) -> Sequence[Fork | None]:
        options = self._options
        newest = [each for each in rounds[-1] if isinstance(each, Trajectory)]
        if options.rule in ("correct", "clean"):
            if options.steps and len(rounds) > options.steps:
                return ()
            tried = [each for each in newest if not each.branches]
            found = await asyncio.gather(*(self._replaced(each, texts) for each in tried))
            return [fork for fork in found if fork][: options.number]
        if len(rounds) == 1:
            return self._questions(newest, texts)
        if len(rounds) == 2:
            attempts = {each.episode: each for each in rounds[0] if isinstance(each, Trajectory)}
            found = [self._read(each, attempts, texts) for each in newest]
            return [fork for fork in found if fork]
        return ()

    def _questions(self, attempts: Sequence[Trajectory], texts: Texts) -> list[Fork]:
        """Return forks in which the policy writes about attempts, up to `number`."""
        options = self._options
        usable = [each for each in attempts if not each.branches]
        if options.rule == "reflect" and options.attempts == "failed":
            usable = [each for each in usable if not each.success]
        forks = []
        for attempt in islice(cycle(usable), options.number):
            said = _steps(attempt, texts)
            if options.rule == "plan":
                note = texts.prompt(PLAN, task=texts.words(attempt), attempt=said)
            else:
                ended = "succeeded" if attempt.success else "failed"
                unless = UNLESS if attempt.success else "."
                note = texts.prompt(REFLECT.format(ended=ended, unless=unless), attempt=said)
            forks.append(Fork(attempt.episode, 0, note=note, writes=True))
        return forks

    def _read(
        self, text: Trajectory, attempts: Mapping[int, Trajectory], texts: Texts
    ) -> Fork | None:
        """Return the fork with which the retry begins that a written text asks for, or None.

        None means that the text is unusable.
        """
        assert text.fork is not None
        written = texts.written(text)
        if self._options.rule == "plan":
            note = f"{PLANNED_BY}\n{written.strip()}"
            return Fork(text.episode, 0, note=note) if written.strip() else None
        found = read_reflection(written, attempts[text.fork.parent])
        if found is None:
            return None
        at, advice = found
        hint = Placed(texts.encode(ADVICE.format(advice=advice)), Provenance.FORCED)
        return Fork(text.fork.parent, at, (hint,))

    async def _replaced(self, attempt: Trajectory, texts: Texts) -> Fork | None:
        """Return the fork that replaces the next reply of an attempt. None if nothing is to be
        replaced.
        """
        if self._options.rule == "clean":
            return self._cleaned(attempt, texts)
        if self._options.corrector:
            return None if attempt.success else await self._corrected(attempt, texts)
        found = None if attempt.success else await texts.correction(attempt)
        if found is None:
            return None
        at, tokens = found
        fork = Fork(attempt.episode, at, (Placed(tokens, Provenance.FOREIGN),))
        # what was corrected is not corrected again
        is_later = attempt.fork is None or at > attempt.fork.at
        return fork if is_later else None

    async def _corrected(self, attempt: Trajectory, texts: Texts) -> Fork | None:
        """Return the fork with the corrector's text in place of the first wrong step.

        None if there is no wrong step after what was corrected before, or no usable text.
        """
        from unstale.envs.guard import call
        from unstale.research.steps import place_of, split

        options, task = self._options, texts.words(attempt)
        steps = split(attempt, texts, options.step)
        if self._judge:
            seed = derive_seed(attempt.seed, "judge")
            wrong = await call(self._judge.first_wrong, task, steps, seed)
        else:
            wrong = _step_at(await texts.correction(attempt), attempt, steps, texts)
        if wrong is None:
            return None
        at, text = place_of(attempt, steps[wrong].reply, steps[wrong].start, texts)
        fork = attempt.fork
        done = fork.at + sum(len(piece.tokens) for piece in fork.text) if fork else 0
        if at < done:  # it is in what was corrected before
            return None
        placed = await self._written(attempt, at, text, task, steps[: wrong + 1], texts)
        return Fork(attempt.episode, at, (placed,)) if placed else None

    async def _written(  # noqa: PLR0913 - a place, and the texts around it
        self,
        attempt: Trajectory,
        at: int,
        text: str,
        task: str,
        steps: Sequence[Step],
        texts: Texts,
    ) -> Placed | None:
        """Return what the corrector writes after the first `at` tokens of an attempt.

        `text` is between them and the last step of `steps`, which is wrong. None if what it writes
        is empty, does not fit into the reply, or has control tokens.
        """
        from unstale.envs.guard import call
        from unstale.research.steps import ENDS, FolderCorrector

        options = self._options
        kind = "reply" if options.until == "end" else options.step
        seed = derive_seed(attempt.seed, "correct", at)
        room = texts.room(attempt, at)
        before = attempt.tokens[:at]
        if isinstance(self._corrector, FolderCorrector):
            write = self._corrector.tokens
            tokens, logps = await call(write, before, kind, room, texts.ends, seed)
            version = min(attempt.versions)
            return Placed(tokens, Provenance.FOREIGN, version, logps) if tokens else None
        assert self._corrector, "prepare"
        *right, wrong = steps
        written = await call(self._corrector.write, task, right, wrong.text, seed)
        if written is None or not written.strip():
            return None
        if kind == "reply":  # it may have tool calls, which are control tokens
            tokens = texts.end(texts.encode_whole(text + written.strip(), texts.whole(before[-1:])))
            is_whole = not texts.ends.intersection(tokens[:-1])
        else:
            tokens, is_whole = texts.encode(f"{text}{written.strip()}{ENDS[kind]}"), True
        return Placed(tokens, Provenance.FOREIGN) if is_whole and len(tokens) <= room else None

    def _cleaned(self, attempt: Trajectory, texts: Texts) -> Fork | None:
        """Return a fork that replaces the first failed call by the call of a later reply. None if
        there is none.
        """
        said = replies(attempt.pieces)
        own = attempt.fork.at + 1 if attempt.fork else 0  # a replaced call is not replaced again
        failed = [self._failed(attempt, number, said, texts) for number in range(len(said))]
        for number, (start, tokens) in enumerate(said):
            if not failed[number] or start < own:
                continue
            later = range(number + 1, len(said))
            better = next((other for other in later if not failed[other]), None)
            if better is None or not texts.parse(said[better][1]).tool_calls:
                return None
            at, new = said[better]
            first, second = _start_of_call(tokens, texts), _start_of_call(new, texts)
            alike = SequenceMatcher(
                None, texts.text(tokens[first:]), texts.text(new[second:]), autojunk=False
            ).ratio()
            if alike < self._options.similarity:
                first = second = 0
            return _spliced(attempt, start + first, at + second, at + len(new))
        return None

    def _failed(
        self,
        attempt: Trajectory,
        number: int,
        said: Sequence[tuple[int, tuple[int, ...]]],
        texts: Texts,
    ) -> bool:
        """Return True if reply `number` of an attempt has a tool call whose result is an error.

        `said` has start and tokens of each reply.
        """
        start, tokens = said[number]
        stop = said[number + 1][0] if number + 1 < len(said) else len(attempt)
        message = texts.parse(tokens)
        answer = texts.text(attempt.tokens[start + len(tokens) : stop])
        return bool(message.tool_calls) and bool(re.search(self._options.error, answer))

    def estimate(self, groups: Sequence[Group], context: CreditContext) -> list[ScoredTrajectory]:
        scored: list[ScoredTrajectory] = []
        gains: list[float] = []
        for group in groups:
            own = {each.episode: self._advantage(each, group) for each in group.trajectories}
            next_of: dict[int, Trajectory] = {}
            for each in group.finished:
                before = next_of.get(each.fork.parent) if each.fork else None
                if each.fork and each.fork.at > (before.fork.at if before and before.fork else 0):
                    next_of[each.fork.parent] = each
            for each in group.trajectories:
                shown = without_advice(each) if self._options.rule == "reflect" else each
                values = of_tokens(shown, own[each.episode])
                values = self._shared(shown, values, own, next_of)
                scored.append(ScoredTrajectory(shown, values))
                scored += [ScoredTrajectory(one, (own[each.episode],)) for one in each.branches]
            scored += self._of_texts(group, own, context, gains)
        self._measure(groups, gains, context)
        return scored

    def _advantage(self, episode: Trajectory, group: Group) -> float:
        options = self._options
        compared = [*group.finished]
        if options.rule == "plan":
            compared = [each for each in compared if bool(each.fork) == bool(episode.fork)]
        elif options.rule == "clean":
            parents = {each.fork.parent for each in compared if each.fork}
            compared = [each for each in compared if each.episode not in parents]
        advantage = episode.reward - fmean(each.reward for each in compared)
        if options.rule != "reflect" or advantage <= 0:
            return advantage
        return 1.0 if episode.success else advantage * options.amplify

    def _shared(
        self,
        episode: Trajectory,
        values: tuple[float, ...],
        own: Mapping[int, float],
        next_of: Mapping[int, Trajectory],
    ) -> tuple[float, ...]:
        """Return the advantages of an attempt's tokens, corrected if a retry starts from it.

        `values` are those without the correction. `own` has advantages and `next_of` retries, by
        the number of the episode.
        """
        retry = next_of.get(episode.episode)
        if retry is None or retry.fork is None:
            return values
        at = retry.fork.at
        if self._options.rule == "reflect":
            return values if self._options.train_shared else (*[0.0] * at, *values[at:])
        while retry.episode in next_of:
            retry = next_of[retry.episode]
        before = of_tokens(episode, own.get(retry.episode, 0.0))
        after = [0.0] * (len(values) - at) if self._options.rule == "clean" else values[at:]
        return (*before[:at], *after)

    def _of_texts(
        self,
        group: Group,
        own: Mapping[int, float],
        context: CreditContext,
        gains: list[float],
    ) -> list[ScoredTrajectory]:
        """Return the written texts of a group, scored. Append to `gains` what each retry gained in
        reward.
        """
        attempts = {each.episode: each for each in group.finished}
        if self._options.rule in ("correct", "clean"):
            gains += [
                each.reward - attempts[each.fork.parent].reward
                for each in attempts.values()
                if each.fork and each.fork.parent in attempts
            ]
            return []
        scored = []
        for text in group.texts:
            retry = self._retry_of(text, attempts, context.texts)
            gain = 0.0
            if retry and text.fork and (attempt := attempts.get(text.fork.parent)):
                gain = retry.reward - attempt.reward
                gains.append(gain)
            advantage = own.get(retry.episode, 0.0) if retry else 0.0
            if self._options.rule == "reflect":
                advantage = float(gain > 0)
            if self._options.train_texts:
                scored.append(ScoredTrajectory(text, (advantage,)))
        return scored

    def _retry_of(
        self, text: Trajectory, attempts: Mapping[int, Trajectory], texts: Texts | None
    ) -> Trajectory | None:
        """Return the retry that a written text led to. None if no retry began, or if it did not
        finish.
        """
        retries = [(each.fork, each) for each in attempts.values() if each.fork]
        if self._options.rule == "plan":
            return next((each for fork, each in retries if fork.parent == text.episode), None)
        if texts is None or text.fork is None or text.fork.parent not in attempts:
            return None
        wanted = self._read(text, attempts, texts)
        return next((each for fork, each in retries if fork == wanted), None)

    def _measure(
        self, groups: Sequence[Group], gains: Sequence[float], context: CreditContext
    ) -> None:
        ended = [each for group in groups for each in group.trajectories]
        retries = [each for each in ended if each.fork]
        written = sum(each.num_sampled for group in groups for each in group.texts)
        error = stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else 0.0
        parents = {each.fork.parent for each in retries if each.fork}
        failed = [each for each in ended if not each.success]
        untried = sum(each.episode not in parents for each in failed)
        context.metrics.update(
            {
                "retry/untried_share": untried / max(1, len(failed)),
                "retry/episode_share": len(retries) / max(1, len(ended)),
                "retry/success_share": fmean(each.success for each in retries) if retries else 0.0,
                "retry/gain_mean": fmean(gains) if gains else 0.0,
                "retry/gain_error": error,
                "retry/text_tokens": written,
            }
        )


def _steps(attempt: Trajectory, texts: Texts) -> str:
    """Return an attempt as text in which the replies are numbered."""
    lines: list[str] = []
    end = 0
    tokens = attempt.tokens
    for number, (start, said) in enumerate(replies(attempt.pieces), 1):
        lines += [texts.text(tokens[end:start]), f"[step {number}] {texts.text(said)}"]
        end = start + len(said)
    return "\n".join([*lines, texts.text(tokens[end:])] if end < len(tokens) else lines)


def read_reflection(text: str, attempt: Trajectory) -> tuple[int, str] | None:
    """Return the number of tokens before the reply to change, and the advice, from a written text.

    None unless the text has a JSON object with advice and the number of a reply of the attempt.
    """
    begin, end = text.find("{"), text.rfind("}")
    try:
        found = json.loads(text[begin : end + 1])
    except (ValueError, RecursionError):
        return None
    match found:
        case {"advice": str(advice), "step": int(step)} if advice.strip() and step is not True:
            said = replies(attempt.pieces)
            if 0 < step <= len(said):
                return said[step - 1][0], " ".join(advice.split())
    return None


def without_advice(retry: Trajectory) -> Trajectory:
    """Return a retry without its advice. The text sampled after the advice becomes REWRITTEN text.

    An episode that is not a retry is returned unchanged.
    """
    if retry.fork is None:
        return retry
    at, (hint,) = retry.fork.at, retry.fork.text
    return replace(retry, pieces=remove_text(retry.pieces, at, at + len(hint.tokens)))


def _step_at(
    found: tuple[int, tuple[int, ...]] | None,
    attempt: Trajectory,
    steps: Sequence[Step],
    texts: Texts,
) -> int | None:
    """Return the index of the step with the place of a correction. None without a correction."""
    if found is None:
        return None
    at, _ = found
    starts = [start for start, _ in replies(attempt.pieces)]
    reply = max(number for number, start in enumerate(starts) if start <= at)
    passed = len(texts.text(attempt.tokens[starts[reply] : at]))
    own = [i for i, step in enumerate(steps) if step.reply == reply and step.start <= passed]
    return own[-1]


def _start_of_call(reply: Sequence[int], texts: Texts) -> int:
    """Return the number of tokens of a reply before its tool calls."""
    calls = texts.parse(reply).tool_calls
    starts = range(len(reply) - 1, 0, -1)
    return next((at for at in starts if texts.parse(reply[at:]).tool_calls == calls), 0)


def _spliced(attempt: Trajectory, at: int, start: int, stop: int) -> Fork | None:
    """Return a fork before token `at` that continues with the later tokens `start` to `stop`.

    None if the policy did not sample all of these tokens in this attempt.
    """
    edit = Edit(at, at, attempt.tokens[at:start])
    text: list[Placed] = []
    for begin, piece, _ in walk(attempt.pieces):
        low, high = max(start - begin, 0), min(stop - begin, len(piece.tokens))
        if low >= high:
            continue
        if not isinstance(piece, Sampled):
            return None
        logps = piece.behavior_logp[low:high]
        tokens = piece.tokens[low:high]
        text.append(Placed(tokens, Provenance.REWRITTEN, piece.version, logps, edit))
    return Fork(attempt.episode, at, tuple(text))


def _check(options: RetryConfig, config: RunConfig) -> None:
    check_number("retry", options.number, config)
    placed = {
        "reflect": ("otherwise retries have no loss: their replies were sampled with advice", True),
        "correct": (
            "otherwise the right replies have no loss"
            + ("" if options.is_sampled else ": their source is unknown"),
            options.is_sampled,
        ),
    }
    if options.rule in placed:
        reason, has_source = placed[options.rule]
        allowed = ["anchor", "guided"] if has_source else ["anchor"]
        require_value("retry", "objective.placed", config.objective.placed, allowed, reason)
    refuse_slots("retry", REFUSED, config)
    if options.corrector:
        from unstale.research.steps import check_corrector, check_judge

        check_corrector(options.corrector)
        if options.judge:
            check_judge(options.judge)
    if options.rule in ("reflect", "clean"):
        refuse_kept_sets("retry", config)
    check_sequences(config, "retry")


def _outside(options: RetryConfig) -> dict[str, str]:
    from unstale.research.steps import is_function

    names = {"judge": options.judge, "corrector": options.corrector}
    return {option: name for option, name in names.items() if is_served(name) or is_function(name)}


def _describe(options: RetryConfig) -> str:
    number = f"at most {options.number} attempts of a group are tried again"
    often = f"up to {options.steps} times" if options.steps else "until they succeed"
    return {
        "reflect": f"{number} with advice, from a reply that the policy names; the advice is "
        "removed before training",
        "plan": f"{number} with a plan that the policy writes from an attempt",
        "correct": f"{number} from a right {'step' if options.corrector else 'reply'} in place of "
        f"the first wrong one, {often}, which is imitation"
        + (f"; {options.judge or 'the task set'} finds it" if options.corrector else "")
        + (f", and {options.corrector} writes the right one" if options.corrector else ""),
        "clean": f"{number} with a later call in place of one that failed, {often}",
    }[options.rule]


_MEASURED = """
A combination lock: 8 replies with 4 words each, reward 1 only if all are right. 150 steps of 4
first attempts and at most 4 retries, which begin at the first wrong reply and are right in each
later one with probability 0.925 or more. 12 seeds (`tests/techniques/test_retry.py`), the
probability of opening the lock at the end:

| | retries trained on (anchor) | not trained on (mask, which is refused) |
|---|---|---|
| replies before a retry hidden in the first attempt | 0.97, 5,800 tokens | 0.84, 7,400 |
| `train_shared` | 0.97, 5,900 tokens | 0.00, 9,400 |

Without retries it is 0.00. So the place of the error teaches by itself, if it is right: the replies
before it are not blamed.

`correct` with right replies from the task set opens it in 0.97, if `steps` is 0; with `steps` 1 in
0.00, because most attempts have several wrong replies (`tests/techniques/test_retry_rules.py`). A
`judge` and a `corrector` that are right do the same (`tests/techniques/test_correctors.py`).

`clean` with `guided`, where a second call repairs an error (the same file, 12 seeds of 60 steps):
evaluations with one call succeed in 0.72, without `clean` in 0.47; with a second call after an
error both in 0.99.

The advice of this toy is right. A small policy's advice may not be: `retry/success_share` beside
the success of first attempts shows what it is worth. SmolLM2-135M gave no readable advice about
products of two numbers, so there were no retries. It has not been measured on the desks.
"""

ENTRY = Entry(
    name="retry",
    slot="strategy",
    rows=(9, 34, 40, 44),
    makes=Retry,
    options=RetryConfig,
    changes=frozenset({"count", "advantage", "objective"}),
    describe=_describe,
    requires=frozenset({"siblings", "rewards"}),
    check=_check,
    task_methods=lambda options: (
        ("correction", "demonstration") if options.rule == "correct" and not options.judge else ()
    ),
    outside=_outside,
    complete=complete_number,
    forks_after_turns=True,
    use="Most episodes of several replies fail at one of them, and the policy (`reflect`) or the "
    "task set or a process reward model (`correct`) can say which. `clean`: calls fail and are "
    "repaired. `plan`: the policy will attempt tasks twice. R3L uses `reflect` with `opmd`.",
    measured=_MEASURED,
    exactness="`reflect`: with `objective.placed guided`, retries have the weights of "
    "docs/placed.md; with anchor their loss is weighted imitation. A fork chosen after the episode "
    "biases the gradient of the replies before it, so these have the advantage 0. `plan`: all "
    "tokens are in their own context; the gradient is that of success with and without a plan, "
    "and the mean of compared attempts includes the attempt itself. `correct`: right replies are "
    "imitated with anchor; with `guided`, the text of a corrector in a folder has the weights of "
    "docs/placed.md. Attempts are corrected because they failed, and the replies before the text "
    "are credited with what follows, which is a choice by outcome and biased. `clean`: "
    "later replies are exact in the context without the error; the choice by outcome biases the "
    "gradient, and evaluation has the errors. Advice at the start of the reply instead of in a "
    "message, no loss of REWRITTEN text with an advantage below 0, and "
    "forks of finished attempts instead of changes while they run are our own reading.",
)
