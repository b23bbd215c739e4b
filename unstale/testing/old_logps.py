"""Tests that every route (`OldLogps`) must pass, such as one that a user adds.

A route computes or estimates log-probabilities under the weights that sampled the tokens.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from unstale.model.lora import Lora
from unstale.model.policy import Policy
from unstale.old_logps import Needs, OldLogps, has_clean_behavior
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.old_logps.scoring.scorer import Scorer
from unstale.records import Batch, PendingPiece, Sampled, ScoredTrajectory, collate, walk
from unstale.testing.models import (
    checkpoint_round_trip,
    episode,
    nudge,
    plain_logps,
    tiny_policy,
    with_kept_sets,
)

MakePolicy = Callable[[], Policy]


def check_old_logps(
    make: Callable[[Scorer], OldLogps],
    *,
    lora: Lora | None = None,
    make_policy: MakePolicy | None = None,
) -> None:
    """Test a route, a method to compute old log-probabilities. `make` returns a new one.

    Raise AssertionError if the route breaks its contract. It gets a batch with tokens of three
    versions, some of them sampled with a KV cache of older weights. Its values may have any error,
    except where the route marks them as exact. A second test resumes a killed run from its
    checkpoint. `make_policy` returns a policy with the weights of `tiny_policy(lora=lora)`, which
    may be divided among ranks. None uses `tiny_policy`.
    """
    whole = partial(tiny_policy, lora=lora)
    versions = _Versions(whole())
    policy = (make_policy or whole)()
    with closing(make(_scorer(policy))) as route, closing(make(_scorer(policy))) as restored:
        always_exact = _check_route(route, restored, policy, versions)
    versions.clear()
    _check_recovery(make, make_policy or whole, versions, always_exact=always_exact)


class _Versions:
    """The weights of all published versions, and a whole policy to load them into."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._weights: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, policy: Policy) -> None:
        """Copy the weights of the next version."""
        self._weights.append({name: each.clone() for name, each in policy.whole_weights()})

    def weights(self, version: int) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._weights[version].items()}

    def policy(self, version: int) -> Policy:
        """Return the policy with the weights of a version. It is changed by the next call."""
        self._policy.load_weights(self._weights[version])
        return self._policy

    def clear(self) -> None:
        self._weights.clear()


def _check_route(route: OldLogps, restored: OldLogps, policy: Policy, versions: _Versions) -> bool:
    """Test a route in a run without a crash.

    Return True if it marked all tokens as exact, except those sampled with a cache of older
    weights.
    """
    assert isinstance(route.needs, Needs), "needs must be a Needs"
    for version in range(3):
        if version:
            nudge(policy, seed=version)
        _publish(route, policy, version)
        versions.add(policy)
        arrived = _pieces_of(version, _PLANS)
        # half of version 0 arrives when the weights have changed, if the engines go on
        in_time = arrived[::2] if version == 0 and not route.needs.closing else arrived
        for piece in arrived:
            route.on_piece(piece)
        for piece in in_time:
            route.on_end([piece])
        while version == 1 and route.score_while_idle():
            pass
        if version < 2:
            route.before_update(in_time)
    batch = collate([_episode(number, plan) for number, plan in enumerate(_PLANS)])
    before = {name: getattr(batch, name).clone() for name in ("tokens", "behavior_logp", "version")}
    values, exact = _ask(route, policy, batch)
    _check_shape(batch, values, exact)
    _check_claims(batch, values, exact, versions)
    assert all(torch.equal(getattr(batch, name), old) for name, old in before.items()), (
        "logps must not change the batch"
    )
    again, _ = _ask(route, policy, batch)
    assert torch.equal(values, again), "a second call of logps must return the same values"
    costs = route.costs()
    assert all(math.isfinite(cost) and cost >= 0 for cost in costs.values()), (
        f"costs must be finite and >= 0: {costs}"
    )
    restored.restore(checkpoint_round_trip(route.state()))
    restored.on_published(live={0, 1, 2})
    restored_values, restored_exact = _ask(restored, policy, batch)
    assert torch.equal(restored_values, values), "a restored route must return the same values"
    assert torch.equal(restored_exact, exact), "a restored route must mark the same tokens as exact"
    return torch.equal(exact, has_clean_behavior(batch))


def _check_recovery(
    make: Callable[[Scorer], OldLogps],
    make_policy: MakePolicy,
    versions: _Versions,
    *,
    always_exact: bool,
) -> None:
    """Test a route in a run that is killed and resumed.

    The checkpoint has the weights that the run then publishes as version 3. The run is killed after
    it has published version 4. The resumed run publishes the checkpoint's weights as version 5,
    because the numbers 3 and 4 are used.
    """
    policy = make_policy()
    with closing(make(_scorer(policy))) as route:
        _run_to_checkpoint(route, policy, lambda: versions.add(policy))
        state = checkpoint_round_trip(route.state())
        for piece in _pieces_of(2, _INTERRUPTED)[1::2]:
            route.on_piece(piece)
        for version in (3, 4):
            _publish(route, policy, version)
            versions.add(policy)
            for piece in _pieces_of(version, _INTERRUPTED):
                route.on_piece(piece)
            route.before_update(_pieces_of(version, _INTERRUPTED))
            nudge(policy, seed=version + 1)
    past = {version: _pieces_of(version, _INTERRUPTED) for version in range(5)}
    batch = collate([_episode(number, plan) for number, plan in enumerate(_INTERRUPTED)])
    again = make_policy()
    again.load_weights(again.parts_of(versions.weights(3)))
    again.version = 3
    with closing(make(_scorer(again))) as route:
        route.restore(state)
        again.assign_new_version(5)
        route.recover(past, versions.weights)
        _publish(route, again, 5)
        versions.add(again)
        for piece in _pieces_of(5, _INTERRUPTED):
            route.on_piece(piece)
        values, exact = _ask(route, again, batch)
    _check_shape(batch, values, exact)
    _check_claims(batch, values, exact, versions)
    clean = has_clean_behavior(batch)
    if always_exact:
        assert torch.equal(exact, clean), (
            "an exact route must score the pieces that its state lacks in recover"
        )
        return
    steady = make_policy()
    with closing(make(_scorer(steady))) as route:
        _run_to_checkpoint(route, steady, lambda: None)
        steady.version = 3
        steady.assign_new_version(5)
        _publish(route, steady, 5)
        expected, _ = _ask(route, steady, batch)
    other = clean & ~exact
    assert torch.equal(values[other], expected[other]), (
        "a recovered route must return the values of a route that was never killed"
    )


def _run_to_checkpoint(route: OldLogps, policy: Policy, published: Callable[[], None]) -> None:
    """Publish versions 0 to 2 and train after each, as a run does up to its checkpoint.

    The route gets only half of the pieces that version 2 sampled.
    """
    for version in range(3):
        _publish(route, policy, version)
        published()
        arrived = _pieces_of(version, _INTERRUPTED)[:: 2 if version == 2 else 1]
        for piece in arrived:
            route.on_piece(piece)
            route.on_end([piece])
        while version == 1 and route.score_while_idle():
            pass
        route.before_update(arrived)
        nudge(policy, seed=version + 1)
        route.trained(kept=1.0)


def _episode(
    number: int, plan: Sequence[int | tuple[int, int] | tuple[int, int, bool]]
) -> ScoredTrajectory:
    """Return an episode as `episode` does. Those with odd numbers have kept sets, as after
    truncated sampling.
    """
    made = episode(number, plan)
    return with_kept_sets(made) if number % 2 else made


def _scorer(policy: Policy) -> Scorer:
    return LocalScorer(policy, temperature=1.0, max_tokens=32)


def _publish(route: OldLogps, policy: Policy, version: int) -> None:
    policy.version = version
    route.before_publish()
    route.on_published(live=set(range(version + 1)))


_PLANS: tuple[list[int | tuple[int, int] | tuple[int, int, bool]], ...] = (
    [5, (4, 2)],
    [3, (6, 0), 2, (3, 1), 4, (5, 2)],
    [4, (3, 0), (2, 1), (4, 2), 3, (2, 2)],
    [2, (3, 1), (4, 2, False), 1],
)
_INTERRUPTED: tuple[list[int | tuple[int, int] | tuple[int, int, bool]], ...] = (
    [4, (3, 0), (2, 1), 3, (4, 2)],
    [3, (4, 2), (3, 3), 2, (3, 4)],
    [5, (3, 1), 2, (4, 3), (2, 5)],
    [3, (2, 2), 2, (3, 4), (2, 5)],
    [2, (3, 2, False), (2, 4, False), 3, (3, 5)],
    [6, (4, 5)],
)


def _pieces_of(
    version: int, plans: Sequence[Sequence[int | tuple[int, int] | tuple[int, int, bool]]]
) -> list[PendingPiece]:
    """Return the pieces (runs of tokens) that `version` sampled in these episodes."""
    pieces = []
    for number, plan in enumerate(plans):
        trajectory = _episode(number, plan).trajectory
        for start, piece, _ in walk(trajectory.pieces):
            if isinstance(piece, Sampled) and piece.version == version:
                text = trajectory.tokens[: start + len(piece.tokens)]
                pieces.append(PendingPiece(number, text, start, piece))
    return pieces


def _ask(route: OldLogps, policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    now = torch.empty(0)
    if route.needs.now or route.needs.inline:
        now = policy.score(batch, batch.sampled, temperature=1.0, max_tokens_per_microbatch=64).logp
    return route.logps(batch, now)


def _check_shape(batch: Batch, values: Tensor, exact: Tensor) -> None:
    shape = batch.sampled.shape
    assert values.shape == exact.shape == shape, "values and exact must have the batch's shape"
    assert values.dtype == torch.float32, "values must be float32"
    assert exact.dtype == torch.bool, "exact must be bool"
    assert not values.requires_grad, "values must have no gradient"
    assert values.device.type == exact.device.type == "cpu", "values and exact must be on the CPU"
    assert values[batch.sampled].isfinite().all(), "values of action tokens must be finite"
    assert not values[~batch.sampled].any(), "values must be 0 where not sampled"
    assert not exact[~batch.sampled].any(), "exact must be False where not sampled"
    assert not exact[~batch.clean].any(), "exact must be False for tokens over a kept KV cache"


def _check_claims(batch: Batch, values: Tensor, exact: Tensor, versions: _Versions) -> None:
    for version in range(len(versions)):
        policy = versions.policy(version)
        for start, end in batch.spans():
            mine = exact[start:end] & (batch.version[start:end] == version)
            if not mine.any():
                continue
            kept = batch.kept_sets.at(slice(start, end)) if batch.kept_sets else None
            tokens = batch.tokens[start:end].tolist()
            expected = plain_logps(policy, tokens, kept_sets=kept).float()
            error = (values[start:end] - expected)[mine].abs()
            assert error.max() < 1e-5, (
                f"called exact at version {version}, but off by {error.max():.2g}"
            )
