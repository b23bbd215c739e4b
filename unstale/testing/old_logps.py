"""What every route keeps, exact or not."""

import math
from collections.abc import Callable, Sequence
from contextlib import closing

import torch
from torch import Tensor

from unstale.model.lora import Lora
from unstale.model.policy import Policy
from unstale.old_logps import Needs, OldLogps, has_clean_behavior
from unstale.old_logps.scoring.scorer import LocalScorer
from unstale.records import Batch, PendingPiece, Sampled, collate, walk
from unstale.testing.models import checkpoint_round_trip, episode, nudge, plain_logps, tiny_policy


def check_old_logps(make: Callable[[LocalScorer], OldLogps], *, lora: Lora | None = None) -> None:
    """`make(scorer)` returns a route. Raises AssertionError with what is broken.

    Three versions are published; a batch holds tokens of all of them, within a turn and across turns, and a few
    sampled over a kept cache. A route may be as wrong as it likes about a token, but not about a token it calls exact.
    Then a run is killed, and goes on from its checkpoint with all that was sampled since.
    """
    policy = tiny_policy(lora=lora)
    with closing(make(_scorer(policy))) as route, closing(make(_scorer(policy))) as restored:
        always_exact = _check_route(route, restored, policy)
    _check_recovery(make, always_exact=always_exact, lora=lora)


def _check_route(route: OldLogps, restored: OldLogps, policy: Policy) -> bool:
    """Whether it was exact wherever a route can be."""
    assert isinstance(route.needs, Needs), "needs is a Needs"
    copies: list[Policy] = []
    for version in range(3):
        if version:
            nudge(policy, seed=version)
        _publish(route, policy, version, copies)
        for piece in _pieces_of(version, _PLANS):
            route.arrived(piece)
        while version == 1 and route.idle():
            pass
        if version < 2:
            route.closing(_pieces_of(version, _PLANS))
    batch = collate([episode(number, plan) for number, plan in enumerate(_PLANS)])
    before = {name: getattr(batch, name).clone() for name in ("tokens", "behavior_logp", "version")}
    values, exact = _ask(route, policy, batch)
    _check_shape(batch, values, exact)
    _check_claims(batch, values, exact, copies)
    assert all(torch.equal(getattr(batch, name), old) for name, old in before.items()), (
        "the batch is left as it was"
    )
    again, _ = _ask(route, policy, batch)
    assert torch.equal(values, again), "asked twice, it answers the same"
    costs = route.costs()
    assert all(math.isfinite(cost) and cost >= 0 for cost in costs.values()), (
        f"costs are finite and >= 0: {costs}"
    )
    restored.restore(checkpoint_round_trip(route.state()))
    restored.published(live={0, 1, 2})
    for one, other in zip(_ask(restored, policy, batch), (values, exact), strict=True):
        assert torch.equal(one, other), "restored from its state, it answers the same"
    return torch.equal(exact, has_clean_behavior(batch))


def _check_recovery(
    make: Callable[[LocalScorer], OldLogps], *, always_exact: bool, lora: Lora | None
) -> None:
    """Killed when 3 and 4 were published after the checkpoint that holds the weights of 3: these are called 5 then."""
    policy, copies = tiny_policy(lora=lora), list[Policy]()
    with closing(make(_scorer(policy))) as route:
        _run_to_checkpoint(route, policy, copies)
        state = route.state()
        for piece in _pieces_of(2, _INTERRUPTED)[1::2]:
            route.arrived(piece)
        for version in (3, 4):
            _publish(route, policy, version, copies)
            for piece in _pieces_of(version, _INTERRUPTED):
                route.arrived(piece)
            route.closing(_pieces_of(version, _INTERRUPTED))
            nudge(policy, seed=version + 1)
    state = checkpoint_round_trip(state)
    past = {version: _pieces_of(version, _INTERRUPTED) for version in range(5)}
    batch = collate([episode(number, plan) for number, plan in enumerate(_INTERRUPTED)])
    again = copies[3].twin()
    again.version = 3
    with closing(make(_scorer(again))) as route:
        route.restore(state)
        again.assign_new_version(5)
        route.recover(past, lambda version: copies[version].weights())
        _publish(route, again, 5, copies)
        for piece in _pieces_of(5, _INTERRUPTED):
            route.arrived(piece)
        values, exact = _ask(route, again, batch)
    _check_shape(batch, values, exact)
    _check_claims(batch, values, exact, copies)
    clean = has_clean_behavior(batch)
    if always_exact:
        assert torch.equal(exact, clean), (
            "what its state lacked is made good by recover: it stays exact"
        )
        return
    steady = tiny_policy(lora=lora)
    with closing(make(_scorer(steady))) as route:
        _run_to_checkpoint(route, steady, [])
        steady.version = 3
        steady.assign_new_version(5)
        _publish(route, steady, 5, [])
        expected, _ = _ask(route, steady, batch)
    other = clean & ~exact
    assert torch.equal(values[other], expected[other]), (
        "recovered, it answers as if it had never been killed"
    )


def _run_to_checkpoint(route: OldLogps, policy: Policy, copies: list[Policy]) -> None:
    """Versions 0 to 2, and the step that leads to 3, which is not published; half the pieces of 2 are still to come."""
    for version in range(3):
        _publish(route, policy, version, copies)
        arrived = _pieces_of(version, _INTERRUPTED)[:: 2 if version == 2 else 1]
        for piece in arrived:
            route.arrived(piece)
        while version == 1 and route.idle():
            pass
        route.closing(arrived)
        nudge(policy, seed=version + 1)
        route.trained(kept=1.0)


def _scorer(policy: Policy) -> LocalScorer:
    return LocalScorer(policy, temperature=1.0, max_tokens=32)


def _publish(route: OldLogps, policy: Policy, version: int, copies: list[Policy]) -> None:
    policy.version = version
    copies.append(policy.twin())
    route.publishing()
    route.published(live=set(range(version + 1)))


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
    """The pieces of these episodes that `version` sampled, as they would arrive."""
    found = []
    for number, plan in enumerate(plans):
        trajectory = episode(number, plan).trajectory
        for start, piece, _ in walk(trajectory.pieces):
            if isinstance(piece, Sampled) and piece.version == version:
                found.append(
                    PendingPiece(
                        number, trajectory.tokens[: start + len(piece.tokens)], start, piece
                    )
                )
    return found


def _ask(route: OldLogps, policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    now = torch.empty(0)
    if route.needs.now or route.needs.inline:
        now = policy.score(batch, batch.sampled, temperature=1.0, max_tokens_per_microbatch=64).logp
    return route.logps(batch, now)


def _check_shape(batch: Batch, values: Tensor, exact: Tensor) -> None:
    assert values.shape == exact.shape == batch.sampled.shape, "one value and one claim per token"
    assert values.dtype == torch.float32 and exact.dtype == torch.bool, (
        "float32 values, bool claims"
    )
    assert not values.requires_grad, "no gradient flows through an old logit"
    assert values.device.type == exact.device.type == "cpu", "answers are on the CPU"
    assert values[batch.sampled].isfinite().all(), "every action token has a finite value"
    assert not values[~batch.sampled].any(), "0 off the mask"
    assert not exact[~batch.sampled].any(), "nothing is exact off the mask"
    assert not exact[~batch.clean].any(), "a token sampled over a kept cache is never exact"


def _check_claims(batch: Batch, values: Tensor, exact: Tensor, copies: Sequence[Policy]) -> None:
    for start, end in batch.spans():
        tokens = batch.tokens[start:end].tolist()
        for version, copy in enumerate(copies):
            mine = exact[start:end] & (batch.version[start:end] == version)
            error = (values[start:end] - plain_logps(copy, tokens).float())[mine].abs()
            assert error.numel() == 0 or error.max() < 1e-5, (
                f"called exact at version {version}, but off by {error.max():.2g}"
            )
