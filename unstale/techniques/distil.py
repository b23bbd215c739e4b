"""`distil`: on-policy distillation, which pulls each sampled token towards a teacher.

With the policy p, the teacher q and mu, the policy that sampled the tokens, the loss of a batch
adds `coef` times one of these divergences at each sampled token:

`sampled`: KL(p || q), estimated at the sampled token. The reward log q - log p is added to the
token's advantage, so D and S weight it as they weight every advantage. p is the policy of the
training pass, and q is asked for one log-probability per token.
`reverse`: KL(p || q) over the whole vocabulary.
`forward`: KL(q || p) over the whole vocabulary.
`mixed`: beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (GKD).

The advantages of rewards are multiplied by `advantage_coef`, which is 0 in plain distillation.

The teacher is a model folder, a server, the policy of an earlier step, or the policy itself with
more text in its prompt. The prompt of the teacher may have the `context`, such as the solution, at
the end of its last message. From On-Policy Distillation of Language Models (GKD, arXiv 2306.13649).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from unstale.config.checks import (
    ConfigError,
    NonNegative,
    Positive,
    Range,
    Section,
    Share,
    is_served,
)
from unstale.config.techniques import Entry, chosen

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.records import Batch

START, SELF = "start", "self"
"""Names of the two teachers that are the policy itself: at an earlier step, or with current
weights.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilConfig(Section):
    """On-policy distillation from one or more teachers."""

    teacher: str = ""
    """The teacher: a model folder, the address of a server (`http://...`), `start` for the policy
    at the start of the run, or `self` for the policy itself with `context`. Several teachers are
    separated by spaces and have names, as in `math=models/a code=models/b`.
    """
    divergence: Literal["sampled", "reverse", "forward", "mixed"] = "sampled"
    """The divergence from the teacher: `sampled` needs one log-probability per token from the
    teacher, the others need its whole distribution.
    """
    beta: Share = 0.5
    """Only for `divergence = mixed`: weight of the teacher in the mixture of teacher and policy;
    near 0 it is like `forward`, near 1 like `reverse`.
    """
    coef: Positive = 1.0
    """Coefficient of the divergence in the loss."""
    advantage_coef: NonNegative = 0.0
    """Factor of the advantages of rewards; 0 trains only on the teacher."""
    context: str = ""
    """Text that only the teacher reads, at the end of the last message of the prompt. `{name}` is
    replaced by the field `name` of the task's data, such as `{answer}`.
    """
    domain: str = "env"
    """Only for several teachers: the field of the task's data that names the task's teacher. `env`
    stands for the name of the environment.
    """
    refresh: Annotated[int, Range(0)] = 0
    """Only for the teacher `start`: number of optimizer steps after which the teacher becomes the
    current policy; 0 keeps the first policy.
    """

    @property
    def teachers(self) -> Mapping[str, str]:
        """For each teacher, by name: its folder or address, or `start` or `self`. A single teacher
        has the name "".
        """
        if "=" not in self.teacher.partition("://")[0]:
            return {"": self.teacher}
        return dict(_named(each) for each in self.teacher.split())

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.teachers.values())

    @property
    def is_full(self) -> bool:
        """True if the divergence needs the teacher's whole distribution."""
        return self.divergence != "sampled"

    @property
    def has_lessons(self) -> bool:
        """True if the teacher or its prompt depends on the task."""
        return bool(self.context) or len(self.sources) > 1

    def check_combination(self) -> None:
        names = [_named(each)[0] for each in self.teacher.split()] if "=" in self.teacher else []
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"distil.teacher names {twice[0]} twice, got {self.teacher!r}")
        if self.divergence != "mixed" and self.beta != self.defaults()["beta"]:
            raise ConfigError(
                f"distil.beta = {self.beta:g} is used only with distil.divergence = mixed, got "
                f"{self.divergence}"
            )
        if self.refresh and self.sources != (START,):
            raise ConfigError(
                f"distil.refresh = {self.refresh} needs distil.teacher = {START}, got "
                f"{self.teacher!r}: other teachers have fixed weights"
            )
        if SELF in self.sources and not self.context:
            raise ConfigError(
                f"distil.teacher = {SELF} needs distil.context: without it the teacher is equal to "
                "the policy, and there is nothing to learn"
            )


def _named(word: str) -> tuple[str, str]:
    """Return name and source of one of several teachers, from `name=source`.

    Raises `ConfigError` for another form.
    """
    name, equals, source = word.partition("=")
    if not (name and equals and source):
        raise ConfigError(
            f"distil.teacher: every one of several teachers needs a name, as in name=models/a, got "
            f"{word!r}"
        )
    return name, source


class Distil:
    """A technique that pulls the policy towards a teacher by a divergence."""

    def __init__(self, options: DistilConfig) -> None:
        self.options = options

    def rewarded(self, batch: Batch, teacher_logp: Tensor, logp: Tensor) -> Batch:
        """Return the batch with the advantages of this training pass: of rewards and of the
        teacher.

        All tensors are `[T]`. `teacher_logp` is empty if the divergence is over the whole
        vocabulary.
        """
        from unstale.algorithms.distillation import reverse_advantage

        options = self.options
        advantage = options.advantage_coef * batch.advantage
        if len(teacher_logp):
            reward = reverse_advantage(logp, teacher_logp).where(batch.sampled, 0.0)
            advantage = advantage + options.coef * reward
        return replace(batch, advantage=advantage)

    def divergence(self, logp: Tensor, teacher_logp: Tensor) -> Tensor:
        """Return the divergence `[...]` of log-probabilities `[..., V]` of policy and teacher."""
        from unstale.algorithms.distillation import MIXTURES, mixed_divergence

        options = self.options
        beta = MIXTURES.get(options.divergence, options.beta)
        return mixed_divergence(logp, teacher_logp, beta=beta)


def _check(options: DistilConfig, config: RunConfig) -> None:
    if not options.teacher:
        raise ConfigError(
            "the technique distil needs distil.teacher: a model folder, http://host:port, "
            f"{START} or {SELF}"
        )
    if truncated := config.engine.truncated_by:
        raise ConfigError(
            f"the technique distil is not built with {truncated}: the policy's log-probabilities "
            "are over the kept set of each token, the teacher's over its whole vocabulary. Sample "
            "from the whole distribution, or remove distil from --techniques"
        )
    if config.engine.logit_bias:
        raise ConfigError(
            "the technique distil is not built with engine.logit_bias: the policy's logits have "
            "the bias, the teacher's do not. Remove one of both"
        )
    if config.advantage.estimator == "gae":
        raise ConfigError(
            "the technique distil is not built with advantage.estimator = gae: the critic would "
            "read the hidden states of the teacher's passes, too. Use grpo, or remove distil"
        )
    if config.schedule.resampled_groups:
        raise ConfigError(
            "the technique distil needs schedule.resampled_groups = 0, got "
            f"{config.schedule.resampled_groups}: groups with equal rewards would be left out, and "
            "the teacher grades them, too"
        )
    if filters := [each.name for each in chosen(config.techniques) if each.slot == "filter"]:
        raise ConfigError(
            f"techniques has distil and {filters[0]}, which is not built: if no episode of a batch "
            "is left, its episodes get the advantage 0, to which the teacher would add. Remove one "
            "of them"
        )
    if any(map(is_served, options.sources)):
        _check_served(options, config)
    if SELF in options.sources:
        _check_self(config)
    if options.is_full:
        _check_full(options, config)
    sources = [each.name for each in chosen(config.techniques) if each.slot == "source"]
    if sources and not options.advantage_coef:
        raise ConfigError(
            f"techniques has distil and {sources[0]}, which stores only groups with an advantage: "
            f"set distil.advantage_coef, or remove {sources[0]}"
        )
    if options.has_lessons and sources:
        what = "distil.context" if options.context else "several distil.teacher"
        raise ConfigError(
            f"techniques has distil with {what}, and {sources[0]}, which is not built: a stored "
            f"group does not keep its task. Remove {sources[0]}, or use one teacher without context"
        )


def _check_served(options: DistilConfig, config: RunConfig) -> None:
    if options.is_full:
        raise ConfigError(
            f"distil.divergence = {options.divergence} is not built with a served teacher, got "
            f"{options.teacher!r}: it is asked for log-probabilities of given tokens only. Use "
            "distil.divergence = sampled, or the teacher's folder"
        )
    if config.deterministic:
        raise ConfigError(
            "a served distil.teacher needs deterministic = false: equal runs are impossible, "
            "because a server may return other digits when it is asked again. Use the teacher's "
            "folder"
        )
    if config.engine.temperature != 1:
        raise ConfigError(
            "a served distil.teacher needs engine.temperature = 1, got "
            f"{config.engine.temperature:g}: another is impossible, because servers return "
            "log-probabilities of prompts at temperature 1. Use the teacher's folder"
        )


def _check_self(config: RunConfig) -> None:
    for name in ("minibatches_per_batch", "epochs_per_batch"):
        if (value := getattr(config.trainer, name)) > 1:
            raise ConfigError(
                f"distil.teacher = {SELF} needs trainer.{name} = 1, got {value}: a copy of the "
                "teacher for all optimizer steps of a batch is not built. Use distil.teacher = "
                f"{START}"
            )


def _check_full(options: DistilConfig, config: RunConfig) -> None:
    if config.cluster.trainers:
        raise ConfigError(
            f"distil.divergence = {options.divergence} needs cluster.trainers = 0, got "
            f"{config.cluster.trainers}: not built, because no rank has all logits of the policy. "
            "Use distil.divergence = sampled"
        )
    if config.engine.bitwise:
        raise ConfigError(
            f"distil.divergence = {options.divergence} is not built with engine.bitwise: the "
            "log-probabilities of its passes are not computed as in the engine. Use "
            "distil.divergence = sampled"
        )


def _describe(options: DistilConfig) -> str:
    name = {
        "sampled": "KL(pi, teacher) at the sampled token, as an advantage weighted by D and S",
        "reverse": "KL(pi, teacher) over the vocabulary, without a ratio",
        "forward": "KL(teacher, pi) over the vocabulary, without a ratio",
        "mixed": f"the Jensen-Shannon divergence with beta {options.beta:g}, without a ratio",
    }[options.divergence]
    rewards = "rewards are not trained on"
    if options.advantage_coef:
        rewards = f"advantages of rewards count {options.advantage_coef:g} times"
    return f"{options.coef:g} times {name}; teacher {options.teacher}; {rewards}"


_MEASURED = """
A small student in exact arithmetic, 200 steps, 12 seeds: the KL to the teacher at the end, in nats,
with a standard error of 0.11. `python -m benchmarks.stale_distillation` repeats it.

| form | lag 0 | lag 16 | lag 64 |
|---|---|---|---|
| `sampled`, D S | 1.01 | 1.00 | 1.03 |
| `sampled`, D S, `ppo_clip` | 1.01 | 1.05 | 2.00 |
| `sampled`, no ratio | 1.00 | 1.02 | 1.29 |
| `reverse` | 0.98 | 0.98 | 0.98 |
| `forward` | 1.10 | 1.10 | 1.10 |

SmolLM2 with rewards learns 31% of two-number sums in 24 steps, and 2% without rewards from itself
as it is told the answer (`forward`): 30 points less (15 to 45), four seeds
([study](../benchmarks/results/training-study.md)).
"""

ENTRY = Entry(
    name="distil",
    slot="distiller",
    rows=(60,),
    makes=Distil,
    options=DistilConfig,
    changes=frozenset({"advantage", "objective"}),
    describe=_describe,
    evidence="paper",
    fixed={"refresh": "the checkpoint holds the teacher's weights or not"},
    use="A stronger model with the same tokenizer exists, or the policy itself answers better with "
    "a longer prompt. See docs/distillation.md.",
    measured=_MEASURED,
    exactness="`sampled` has in expectation the gradient of KL(pi, teacher) at the states that mu "
    "visited, for stale tokens, too: its weight is D S = pi / mu. What corrections and clips do to "
    "an advantage they do to it. The other divergences are sums over the vocabulary, so they need "
    "no ratio and no old log-probability. States are those of mu in every form.",
    check=_check,
)
