"""Read from a run folder the steps and episodes that `unstale simulate --like` needs."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from unstale.analysis.planner.workload import EpisodeShape, Prefix, TurnShape
from unstale.config import ConfigError, RunConfig
from unstale.config.options import stored_config
from unstale.durability.journal import Journal, JournalError, JournalReader, trained_episodes
from unstale.durability.run_folder import RunFolder
from unstale.records import Sampled, Trajectory, common_prefix, is_reply

MIN_STEPS = 4
"""Smallest number of steps to which durations are fitted."""
_CONTEXT_PIECES = (
    "SELECT count(t.episode), count(*) FROM pieces p LEFT JOIN trajectories t USING (episode)"
)
RESULTS = f"{_CONTEXT_PIECES} WHERE p.version IS NULL AND p.position > 0"
"""SQL query for two numbers of answers by tools or users: in finished episodes, and in all
episodes.
"""
_METRICS = (
    "audit/duration_s",
    "engine/batch_size_mean",
    "engine/busy_s",
    "engine/busy_share",
    "engine/prefill_tokens",
    "engine/sampled_tokens",
    "engine/steps",
    "old_logps/prepare_s",
    "rollout/episodes",
    "rollout/generation_wait_s",
    "rollout/tool_wait_s",
    "rollout/total_tokens_mean",
    "schedule/groups_in_flight",
    "schedule/groups_waiting",
    "schedule/staleness_bound",
    "schedule/wait_for_batch_s",
    "trainer/update_s",
)
"""Names of the metrics that are read."""
_RESTARTS = ("resumed", "trainer_died")
"""Kinds of events after which a run continues from a checkpoint in new processes."""
Row = Mapping[str, Any]
Spans = Mapping[tuple[str, int], Sequence[tuple[float, float]]]
"""Start and end times, in seconds, of a run's activities, by (lane, number). The lane is a row of
the timeline, such as `trainer`, and the number is the step or version in the activity's label.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """The durations of one step of a run, in seconds, and its metrics."""

    step: int
    loaded: float
    """Seconds from the start of the run until engines had loaded the version before this step's."""
    seconds: float
    """Seconds from `loaded` until engines had loaded the version that this step published."""
    publish: float
    """Seconds in which the trainer prepared the new version, while engines sampled."""
    stage: float
    """Seconds from the end of `publish` until engines paused. In this time hosts decoded the
    version.
    """
    load: float
    """Seconds for which engines paused to load the version."""
    optimizer: float
    """Seconds of the optimizer step."""
    checkpoint: float
    """Seconds of writing a checkpoint. 0 if none was written."""
    between: float | None
    """Seconds in which the event loop built and recorded the batch, while the trainer waited.

    They include the pass in which a technique reads hidden states before advantages are computed.
    None if they cannot be separated from other waits.
    """
    versions: float
    """Mean number of versions of the weights that sampled an episode of the batch."""
    evaluation: bool
    """True if an evaluation delayed this step, or made the queue of finished groups fuller than
    usual.
    """
    metrics: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.metrics.get(name, 0.0)

    @property
    def tokens(self) -> float:
        """Number of tokens in the batch."""
        return self["rollout/episodes"] * self["rollout/total_tokens_mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run that has been read from its folder: configuration, steps and episodes."""

    name: str
    config: RunConfig
    steps: tuple[RecordedStep, ...]
    """The steps after the last resume, if there was one, except the first, which warms up the
    processes.
    """
    groups: tuple[tuple[EpisodeShape, ...], ...]
    """The groups of finished episodes, in the order in which they began."""
    call_s: float
    """Mean seconds of a tool call."""
    cores: int
    """Number of processor cores of the machine. 0 if it is not recorded."""
    resumed: int = 0
    """The step after which the run was resumed last. 0 if it never was."""

    @property
    def steady(self) -> tuple[RecordedStep, ...]:
        """The steps after the first `max_staleness` + 1, without those that an evaluation delayed.

        In the first steps the queue of finished groups fills up. It is assumed to fill up again
        after a resume.
        """
        filling = self.resumed + self.config.schedule.max_staleness + 1
        return tuple(each for each in self.steps if each.step > filling and not each.evaluation)

    @classmethod
    def read(cls, run: Path) -> Self:
        """Read the run in folder `run`. If it was resumed, only steps after the last resume are
        read.

        Raises `ConfigError` if options have been renamed since, if the run is too short, if times
        of different work are mixed, or if times or episodes are missing.
        """
        folder = RunFolder(run)
        config = stored_config(folder.config(), f"{run}/config.json")
        require_separate_times(run.name, config)
        logged = [row for row in folder.metrics() if row["step"] > 0 and "engine/steps" in row]
        all_events = list(folder.rows("events.jsonl"))
        rows, events = since_restart(logged, all_events)
        is_resumed = len(events) < len(all_events)
        if len(rows) <= MIN_STEPS:
            since = " since it was resumed" if is_resumed else ""
            raise ConfigError(
                f"{run} has {len(rows)} steps with engine metrics{since}; a fit needs more than "
                f"{MIN_STEPS}"
            )
        versions: dict[int, list[int]] = defaultdict(list)
        with _open_journal(run) as journal:
            for row in trained_episodes(journal):
                versions[row["step"]].append(max(1, len(row["versions"])))
        steps = recorded_steps(
            rows, events, {step: fmean(counts) for step, counts in versions.items()}
        )
        if len(steps) < MIN_STEPS:
            raise ConfigError(
                f"events.jsonl of {run} is incomplete: spans of the trainer are missing"
            )
        groups, call_s = recorded_groups(run, rows, is_resumed=is_resumed)
        cores = [event["cores"] for event in all_events if "cores" in event]
        return cls(
            name=run.name,
            config=config,
            steps=tuple(delayed(steps, config.schedule.max_staleness)),
            groups=groups,
            call_s=call_s,
            cores=int(cores[-1]) if cores else 0,
            resumed=rows[0]["step"] - 1 if is_resumed else 0,
        )


@contextmanager
def _open_journal(run: Path) -> Iterator[JournalReader]:
    """Open the journal of a run folder. Raises `ConfigError` if it is missing or damaged."""
    try:
        with Journal.read(run) as journal:
            yield journal
    except (OSError, JournalError) as error:
        raise ConfigError(
            f"the journal of {run} cannot be read, and its episodes are needed: {error}"
        ) from error


def require_separate_times(name: str, config: RunConfig) -> None:
    """Raise `ConfigError` if the configuration mixes the times of different work.

    `name` is the run's name for the message.
    """
    if config.old_logps.needs.closing:
        raise ConfigError(
            f"{name} pauses generation to score, for a time that is not recorded; "
            "use a run with another route"
        )
    if config.trainer.stream:
        raise ConfigError(
            f"{name} has trainer.stream, so its times of scoring and training are mixed; use a "
            "run without it, and --set fleet.stream=true"
        )


def since_restart(
    rows: Sequence[Row], events: Sequence[Row]
) -> tuple[Sequence[Row], Sequence[Row]]:
    """Return the metrics and events of a run since its last resume. Without a resume, return all.

    Earlier events may be of steps that were lost and repeated with the same numbers.
    """
    restarts = [i for i, event in enumerate(events) if event.get("kind") in _RESTARTS]
    if not restarts:
        return rows, events
    after = events[restarts[-1] + 1 :]
    # a continued run first publishes the version that it has loaded
    published = [version for lane, version in _spans(after) if lane == "publish"]
    first = min(published, default=None)
    return [row for row in rows if first is not None and row["version"] >= first], after


def _spans(events: Sequence[Row]) -> Spans:
    spans: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        number = event.get("label", "").rpartition(" ")[2]
        if event.get("kind") == "span" and number.isdigit():
            spans[event["lane"], int(number)].append((event["start"], event["end"]))
    return spans


def recorded_steps(
    rows: Sequence[Row], events: Sequence[Row], versions: Mapping[int, float]
) -> list[RecordedStep]:
    """Return the steps whose times are complete, without the first.

    `rows` are the metrics, and `events` the lines of `events.jsonl`, both as `since_restart`
    returns them. `versions` maps a step to the mean number of versions that sampled an episode. A
    resume may skip version numbers, so the version of a step is read from its metrics.
    """
    spans = _spans(events)
    steps = []
    for row in rows[1:]:
        step, trained_from = row["step"], row["version"]
        version = trained_from + 1
        needed = [("publish", trained_from), ("publish", version), ("standstill", version)]
        if step not in versions or not all(spans.get(key) for key in needed):
            continue
        (_, before), (began, published) = (
            spans["publish", each][-1] for each in (trained_from, version)
        )
        load = _seconds(spans["standstill", version][-1:])
        steps.append(
            RecordedStep(
                step=step,
                loaded=before,
                seconds=published - before,
                publish=row["publish/trainer_s"],
                stage=max(0.0, published - began - load - row["publish/trainer_s"]),
                load=load,
                optimizer=_seconds(_training(spans, step)[1::2]),
                checkpoint=_seconds(spans.get(("checkpoint", step), ())),
                between=_between(spans, step, version),
                versions=versions[step],
                evaluation=bool(spans.get(("eval", step - 1))),
                metrics={
                    name: float(row[name])
                    for name in _METRICS
                    if isinstance(row.get(name), int | float)
                },
            )
        )
    return steps


def _seconds(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def _training(spans: Spans, step: int) -> list[tuple[float, float]]:
    """Return the start and end times of a step's backward passes and optimizer steps, in turn.

    Activities of the trainer before the batch was scored are left out: a technique reads hidden
    states.
    """
    scored = spans.get(("old_logps", step), ())
    trained = spans.get(("trainer", step), ())
    return [span for span in trained if not scored or span[0] >= scored[0][1]]


def _between(spans: Spans, step: int, version: int) -> float | None:
    """Return the seconds in which the event loop built a batch and recorded it, and the trainer
    waited.

    `version` is the version that the step publishes. In synchronous training the loop also starts
    the next episodes in this time. None if the loop waited for the publication of the previous
    version.
    """
    lanes = ("wait", "old_logps", "trainer")
    if not all(spans.get((lane, step)) for lane in lanes):
        return None
    taken, scored, trained = (spans[lane, step] for lane in lanes)
    loaded = spans["publish", version - 1][-1][1]
    if taken[-1][1] < loaded <= scored[0][0]:
        return None
    after = spans["publish", version][-1][0] - trained[-1][1]
    ready = max([loaded, *(end for _, end in spans.get(("checkpoint", step - 1), ()))])
    gaps = (taken[0][0] - ready, scored[0][0] - taken[-1][1], after)
    return sum(max(0.0, gap) for gap in gaps)


def delayed(steps: Sequence[RecordedStep], max_staleness: int) -> list[RecordedStep]:
    """Return the steps, with `evaluation` set also for those soon after an evaluation.

    In these steps the queue of finished groups is fuller than usual.
    """
    marked = []
    last = -1
    for each in steps:
        if each.evaluation:
            last = each.step
        near = 0 <= each.step - last <= max_staleness + 1 and last >= 0
        marked.append(replace(each, evaluation=near))
    return marked


def recorded_groups(
    run: Path, rows: Sequence[Row], *, is_resumed: bool = False
) -> tuple[tuple[tuple[EpisodeShape, ...], ...], float]:
    """Return the sizes of a run's finished episodes by group, and the mean seconds of a tool call.

    `rows` are the metrics of steps. If `is_resumed`, they are those since a resume. The number of
    tool calls in them is then estimated from the number of episodes that were trained on. The first
    of these steps is left out, because its time includes calls that were repeated to restore open
    episodes.
    """
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    with _open_journal(run) as journal:
        for record in journal.trajectories():
            episode = record.trajectory
            if episode.stop != "pruned" and not (episode.fork and episode.fork.writes):
                groups[record.group].append(episode)
        ((finished, results),) = journal.rows(RESULTS)
    if not groups:
        raise ConfigError(f"the journal of {run} has no finished episode")
    shapes = episode_shapes([siblings for _, siblings in sorted(groups.items())])
    calls = sum(turn.calls for siblings in shapes for shape in siblings for turn in shape.turns)
    if is_resumed:
        rows = rows[1:]
        trained = sum(row.get("rollout/episodes", 0.0) for row in rows)
        calls *= trained / sum(len(siblings) for siblings in shapes)
    else:  # the calls of unfinished episodes are estimated by their results
        calls *= results / max(1, finished)
    waited = sum(row.get("rollout/tool_wait_s", 0.0) for row in rows)
    return shapes, waited / max(1, calls)


def episode_shapes(
    groups: Sequence[Sequence[Trajectory]],
) -> tuple[tuple[EpisodeShape, ...], ...]:
    """Return the sizes of the episodes of each group in tokens, with the prefixes that they
    share.
    """
    names: dict[int, int] = {}
    """Hash of a prefix -> its name. Hashes are kept because they take less memory than tokens."""
    common = common_prefix([_prompt(each) for siblings in groups for each in siblings])
    found = []
    for siblings in groups:
        shapes = []
        for trajectory in siblings:
            shape = episode_shape(trajectory)
            tokens = trajectory.tokens
            starts = [*_reply_starts(trajectory)]
            opening = starts[0] if starts else shape.prompt
            prefixes = [Prefix(0, common)] if 0 < common < opening else []
            name = start = 0
            for end in starts:
                name = names.setdefault(hash((name, tokens[start:end])), len(names) + 1)
                prefixes.append(Prefix(name, end))
                start = end
            shapes.append(shape._replace(prefixes=tuple(prefixes)))
        found.append(tuple(shapes))
    return tuple(found)


def _reply_starts(trajectory: Trajectory) -> Iterator[int]:
    """Yield for each reply the number of tokens before it. Tokens before a fork of the episode
    count.
    """
    start = 0
    for is_sampled, pieces in groupby(trajectory.pieces, is_reply):
        if is_sampled:
            yield start
        start += sum(len(piece.tokens) for piece in pieces)


def _prompt(trajectory: Trajectory) -> tuple[int, ...]:
    first = trajectory.pieces[0]
    return () if isinstance(first, Sampled) else tuple(first.tokens)


def episode_shape(trajectory: Trajectory) -> EpisodeShape:
    """Return the size of an episode in tokens: its prompt, and its turns with their tool calls.

    The recorded number of tool calls is divided evenly among the turns. If no number was recorded,
    each turn has one call. If the episode is a fork, which begins with tokens of a parent episode,
    these tokens are part of the prompt, replies included.
    """
    runs = [
        (is_sampled, sum(len(piece.tokens) for piece in pieces))
        for is_sampled, pieces in groupby(
            trajectory.pieces, lambda piece: isinstance(piece, Sampled)
        )
    ]
    prompt = runs.pop(0)[1] if runs and not runs[0][0] else 0
    replies = [tokens for is_sampled, tokens in runs if is_sampled]
    answers = [*(tokens for is_sampled, tokens in runs if not is_sampled), 0][: len(replies)]
    # The recorded calls include those of replies before a fork.
    num_replies = max(1, sum(1 for _ in _reply_starts(trajectory)))
    calls = trajectory.facts.get("tool_calls", num_replies) * len(replies) / num_replies
    per_turn, more = divmod(round(calls), max(1, len(replies)))
    turns = [
        TurnShape(reply, answer, per_turn + (number < more))
        for number, (reply, answer) in enumerate(zip(replies, answers, strict=True))
    ]
    return EpisodeShape(prompt, tuple(turns))
