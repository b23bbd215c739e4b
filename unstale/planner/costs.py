"""What things cost, and costs that grow in proportion to what there is to do. Imports no torch."""

from dataclasses import dataclass
from typing import Protocol


class Costs(Protocol):
    """Seconds that things take. Engine costs are of one engine, trainer costs of the whole trainer."""

    def step_s(self, replies: int, context: int) -> float:
        """A decoding step of so many replies, with so many tokens of context in all; `prefill_s` computes such."""

    def prefill_s(self, tokens: int) -> float: ...

    def train_s(self, tokens: int) -> float:
        """A whole batch. `optimizer_s` of it come once the engines have the version before."""

    @property
    def optimizer_s(self) -> float: ...

    def old_logps_s(self, tokens: int, versions: float) -> float:
        """The route's share of the trainer's time, for a batch whose sequences hold so many versions on average."""

    def publish_s(self) -> float:
        """To make a version ready, while engines go on. They stand still for `load_s` to take it."""

    def load_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCosts:
    """`Costs` as sums of constants, in seconds: measured ones of a run (`measured.like`), or given ones."""

    decode: float = 0.0
    """One decoding step of an engine, whoever runs."""
    decode_reply: float = 0.0
    """What every running reply adds to a decoding step."""
    decode_context: float = 0.0
    """What every token of their contexts adds to it."""
    prefill_token: float = 0.0
    """Computing one context token."""
    train: float = 0.0
    """One batch, whatever is in it."""
    train_token: float = 0.0
    """What every token of a batch adds."""
    optimizer_s: float = 0.0
    """Of that, what comes once the engines have the version before."""
    old: float = 0.0
    """Old log-probabilities of one batch."""
    old_token: float = 0.0
    """What every token of a batch adds to them."""
    old_version_token: float = 0.0
    """What it adds for every version of its sequence beyond the first."""
    publish: float = 0.0
    """The trainer's time to make a version ready."""
    load: float = 0.0
    """Time that engines stand still to take it."""

    def step_s(self, replies: int, context: int) -> float:
        return self.decode + self.decode_reply * replies + self.decode_context * context

    def prefill_s(self, tokens: int) -> float:
        return self.prefill_token * tokens

    def train_s(self, tokens: int) -> float:
        return self.train + self.train_token * tokens

    def old_logps_s(self, tokens: int, versions: float) -> float:
        return (
            self.old + (self.old_token + self.old_version_token * max(0.0, versions - 1)) * tokens
        )

    def publish_s(self) -> float:
        return self.publish

    def load_s(self) -> float:
        return self.load
