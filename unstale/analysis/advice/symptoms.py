"""Suggest remedies for symptoms of bad training, found in a run's metrics.

A symptom is a figure beyond a limit. Its remedies are options and techniques, grouped by the part
of training that they change, as in the survey GFCR: generate episodes, filter them, control the
update, replay. Limits are rules of thumb, and no remedy is sure to help. Only options that the
linter accepts are suggested.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from unstale.analysis.advice.conclusion import Conclusion, Rule
from unstale.analysis.advice.evidence import Evidence
from unstale.analysis.advice.remedies import accepted
from unstale.config import RunConfig
from unstale.config.options import override
from unstale.lint.finding import Fix
from unstale.observe.words import percent

POOL = 512
"""Number of tasks that a suggested remedy keeps in a pool, where it needs tasks to come again."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """A symptom of bad training, a figure above or below a limit, and its remedies."""

    name: str
    figure: str
    """Name of a figure of `Evidence` that is a share."""
    limit: float
    above: bool
    """True if the symptom is a figure above `limit`, False if it is one below."""
    text: str
    reason: str
    remedies: Callable[[RunConfig], Sequence[Fix]]
    """A function that returns one set of options per remedy, the first choice first."""


def _with(config: RunConfig, name: str, **options: object) -> Fix:
    """Return the options that add the technique `name`. In a keyword, `__` stands for the dot of an
    option's name.
    """
    fixes = {key.replace("__", "."): value for key, value in options.items()}
    return {"techniques": f"{config.techniques} {name}".strip(), **fixes}


def _uniform(config: RunConfig) -> Sequence[Fix]:
    return (
        {"schedule.resampled_groups": config.schedule.groups_per_step},
        _with(config, "beta_sampler", selection__pool=POOL),
    )


def _failed(config: RunConfig) -> Sequence[Fix]:
    return (
        _with(config, "hints", objective__placed="anchor"),
        _with(config, "allocate", allocate__gain="dars_hw"),
    )


def _cut_off(config: RunConfig) -> Sequence[Fix]:
    return _with(config, "truncated"), _with(config, "limits"), _with(config, "long_reply_penalty")


def _uneven(config: RunConfig) -> Sequence[Fix]:
    return _with(config, "ess_lr"), {"schedule.max_staleness": config.schedule.max_staleness // 2}


def _collapsed(config: RunConfig) -> Sequence[Fix]:
    return {"objective.clip_high": 0.28}, _with(config, "token_entropy_advantage")


def _clipped_replay(config: RunConfig) -> Sequence[Fix]:
    return ({"replay.max_age": config.schedule.staleness_bound + 1},)


def _noisy(config: RunConfig) -> Sequence[Fix]:
    return ({"trainer.lr": config.trainer.lr / 5},)


SYMPTOMS = (
    Symptom(
        "equal_rewards", "equal_rewards_share", 0.5, True,
        "Most groups have equal rewards, so nothing is learned from them.",
        "Filter: other groups in their place (`schedule.resampled_groups`). Generate: tasks of "
        "middle difficulty (`beta_sampler`, `predicted_sampler`), larger groups (`allocate`)",
        _uniform,
    ),
    Symptom(
        "no_success", "reward_share", 0.02, False,
        "Hardly an episode succeeds, so there is nothing to reinforce.",
        "Generate: parts of solutions in front of replies (`hints`), retries with advice "
        "(`retry`), more episodes on hard tasks (`allocate`), or reference replies first "
        "(`unstale sft`). Replay: stored successes (`replay`)",
        _failed,
    ),
    Symptom(
        "cut_off", "cut_off_share", 0.2, True,
        "A limit cuts off many episodes, which then count as failures.",
        "Control: no gradient from them (`truncated`). Generate: a limit of turns that follows "
        "successes (`limits`), a penalty for long replies (`long_reply_penalty`), or larger limits",
        _cut_off,
    ),
    Symptom(
        "uneven_ratios", "ratio_ess_share", 0.5, False,
        "A few tokens dominate the update: the effective sample size of pi / mu is small.",
        "Control: smaller steps at a small sample size (`ess_lr`), a mask of the largest ratios "
        "(`m2po`), younger tokens (`schedule.max_staleness`)",
        _uneven,
    ),
    Symptom(
        "entropy_lost", "entropy_left", 0.3, False,
        "The policy has lost most of its entropy, so siblings become alike.",
        "Control: a higher upper clip (`objective.clip_high`), advantages that favour uncertain "
        "tokens (`token_entropy_advantage`, `unlikely_token_bonus`), `novelty`",
        _collapsed,
    ),
    Symptom(
        "old_replays", "replay_clip_share", 0.5, True,
        "The clip stops most replayed tokens, which still count in the divisor of the loss.",
        "Replay: younger groups (`replay.max_age`). Control: a wider clip",
        _clipped_replay,
    ),
    Symptom(
        "noisy_steps", "signal_share", 0.3, False,
        "The gradient is mostly noise, so steps of this size end on a plateau.",
        "Control: try a fifth of the learning rate, and see whether reward rises again "
        "(PPO with a million environments). With k times as many environments "
        "(`schedule.groups_per_step`), keep learning rate and minibatch size, and take k times as "
        "many minibatches (`trainer.minibatches_per_batch`): more data then means more steps, and "
        "not larger ones",
        _noisy,
    ),
)  # fmt: skip


def _rule(symptom: Symptom, evidence: Evidence) -> Conclusion | None:
    value = evidence.get(symptom.figure)
    if value is None or value == symptom.limit or (value > symptom.limit) != symptom.above:
        return None
    config = evidence.config
    fixes = (
        fix
        for fix in symptom.remedies(config)
        if accepted(config, fix) and override(config, fix) != config
    )
    side = "above" if symptom.above else "below"
    return Conclusion(
        name=symptom.name,
        text=symptom.text,
        reason=f"It is {side} {percent(symptom.limit)}, a rule of thumb. {symptom.reason}",
        figures=(symptom.figure,),
        options=next(fixes, {}),
    )


RULES: Sequence[Rule] = tuple(partial(_rule, each) for each in SYMPTOMS)
