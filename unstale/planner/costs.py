"""The time that each part of a run takes, and a linear model of it. Imports no torch."""

from dataclasses import dataclass
from typing import Protocol


class Costs(Protocol):
    """The durations, in seconds, of the work of one engine and of the whole trainer."""

    def step_s(self, replies: int, context: int) -> float:
        """Return the time of a decoding step of `replies` replies, with `context` tokens in sum."""

    def prefill_s(self, tokens: int) -> float:
        """Return the time to compute that many tokens of context."""

    def train_s(self, tokens: int) -> float:
        """Return the time to train on a batch, `optimizer_s` included."""

    @property
    def optimizer_s(self) -> float:
        """The part of `train_s` that starts after the engines have loaded the previous version."""

    def old_logps_s(self, tokens: int, versions: float) -> float:
        """Return the route's time for a batch with `versions` versions per sequence on average."""

    def publish_s(self) -> float:
        """Return the trainer's time to prepare a version, while engines sample."""

    def load_s(self) -> float:
        """Return the time that engines pause to load a version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCosts:
    """The `Costs` as sums of constants in seconds, fitted to a run (`measured.from_run`) or set."""

    decode: float = 0.0
    """One decoding step of an engine."""
    decode_reply: float = 0.0
    """Added to a decoding step by each running reply."""
    decode_context: float = 0.0
    """Added to a decoding step by each token of context."""
    prefill_token: float = 0.0
    """Computing one token of context."""
    train: float = 0.0
    """Training on one batch of any size, the optimizer included."""
    train_token: float = 0.0
    """Added to `train` by each token of the batch."""
    optimizer_s: float = 0.0
    """Part of `train` that starts after the engines have loaded the previous version."""
    old: float = 0.0
    """Old log-probabilities of one batch."""
    old_token: float = 0.0
    """Added to `old` by each token of the batch."""
    old_version_token: float = 0.0
    """Added to `old` by each token, for each version of its sequence beyond the first."""
    publish: float = 0.0
    """The trainer's time to prepare a version."""
    load: float = 0.0
    """Time that engines pause to load a version."""

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

    def load_s(self) -> float:
        return self.load
