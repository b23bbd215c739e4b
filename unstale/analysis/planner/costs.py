"""The durations of a run's parts, and a linear model of them. This module does not import torch."""

from dataclasses import dataclass
from typing import Protocol

from unstale.config.checks import Count, NonNegative, PositiveInt, Section


class Costs(Protocol):
    """The seconds that an engine, or the trainer as a whole, takes for each kind of work."""

    def step_s(self, replies: int, context: int) -> float:
        """Return the seconds of a decoding step: one more token for each of `replies` replies of an
        engine.

        `context` is the sum of their context tokens.
        """

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds in which an engine computes the keys and values of `tokens` context
        tokens.
        """

    def train_s(self, tokens: int) -> float:
        """Return the seconds of training on a batch of `tokens` tokens, with the optimizer step."""

    @property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer step, which `train_s` includes.

        Only this part of training waits until the engines have loaded the previous version.
        """

    def old_logps_s(self, tokens: int, versions: float) -> float:
        """Return the seconds to compute the old log-probabilities of a batch of `tokens` tokens.

        `versions` is the mean number of versions of the weights that sampled a sequence.
        """

    def publish_s(self) -> float:
        """Return the seconds in which the trainer prepares a new version, while engines sample."""

    def stage_s(self) -> float:
        """Return the seconds in which engine hosts decode a new version, while engines still
        sample.
        """

    def load_s(self) -> float:
        """Return the seconds for which engines pause to load a new version."""

    def probe_s(self) -> float:
        """Return the seconds after a load in which complete replies are held back.

        In this time the new weights are checked with a probe: a short reply to a random prompt.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCosts:
    """Durations of generation, training and publishing that are linear in the number of tokens.

    `measured.fit_costs` fits the coefficients to recorded runs.
    """

    decode: float = 0.0
    """Seconds of one decoding step of an engine, whatever the number of replies."""
    decode_reply: float = 0.0
    """Seconds that each running reply adds to a decoding step."""
    decode_context: float = 0.0
    """Seconds that each token of context of a running reply adds to a decoding step."""
    prefill_token: float = 0.0
    """Seconds in which an engine computes the keys and values of one context token."""
    train: float = 0.0
    """Seconds of training on one batch, whatever its size, with the optimizer step."""
    train_token: float = 0.0
    """Seconds that each token of the batch adds to `train`."""
    optimizer_s: float = 0.0
    """Seconds of the optimizer step. They are part of `train`."""
    old: float = 0.0
    """Seconds to compute the old log-probabilities of one batch, whatever its size."""
    old_token: float = 0.0
    """Seconds that each token of the batch adds to `old`."""
    old_version_token: float = 0.0
    """Seconds that each token adds to `old` for each version that sampled its sequence, except the
    first.
    """
    publish: float = 0.0
    """Seconds in which the trainer prepares a version for publication."""
    stage: float = 0.0
    """Seconds in which engine hosts decode a version before it is loaded, while engines sample."""
    load: float = 0.0
    """Seconds for which the engines pause to load a version."""
    probe: float = 0.0
    """Seconds after a load in which complete replies are held back until the weights are
    checked.
    """

    def step_s(self, replies: int, context: int) -> float:
        return self.decode + self.decode_reply * replies + self.decode_context * context

    def prefill_s(self, tokens: int) -> float:
        return self.prefill_token * tokens

    def train_s(self, tokens: int) -> float:
        return self.train + self.train_token * tokens

    def old_logps_s(self, tokens: int, versions: float) -> float:
        per_token = self.old_token + self.old_version_token * max(0.0, versions - 1)
        return self.old + per_token * tokens

    def publish_s(self) -> float:
        return self.publish

    def stage_s(self) -> float:
        return self.stage

    def load_s(self) -> float:
        return self.load

    def probe_s(self) -> float:
        return self.probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Durations of one recorded step, each divided by the one that `Costs` predicts.

    The durations are those of the engines' work, of training, and of computing `old_logp`.
    """

    engine: float = 1.0
    train: float = 1.0
    old: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads(Section):
    """Durations of a run's smaller parts in seconds, and how durations vary from step to step.

    `unstale plan` leaves them out.
    """

    audit_s: NonNegative = 0.0
    """Seconds of the audit of a batch in the trainer's thread. The audit computes some of its
    `old_logp` again, exactly.
    """
    batch_s: NonNegative = 0.0
    """Seconds in which the event loop builds and records a batch, while the trainer waits."""
    checkpoint_s: NonNegative = 0.0
    """Seconds to write a checkpoint. The next optimizer step waits for it."""
    checkpoint_every: Count = 0
    """Number of steps between two checkpoints. 0 writes none."""
    reply_s: NonNegative = 0.0
    """Seconds from the end of a reply in the engine until its episode receives it."""
    turn_s: NonNegative = 0.0
    """Seconds for which a turn occupies the event loop of its rollout process."""
    run_turn_s: NonNegative = 0.0
    """Seconds for which a turn then occupies the event loop of the run's main process."""
    processes: PositiveInt = 1
    """Number of rollout processes, among which groups are divided."""
    paces: tuple[Pace, ...] = ()
    """Paces of recorded steps (measured durations divided by predicted ones), which simulated steps
    use in turn. A step that is slow by chance delays the next one. A fast step does not make up for
    it, so mean durations do not suffice.
    """

    def pace(self, step: int) -> Pace:
        """Return the pace of step `step`, counted from 0."""
        return self.paces[step % len(self.paces)] if self.paces else _EVEN


_EVEN = Pace()
NO_OVERHEADS = Overheads()
