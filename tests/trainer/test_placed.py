"""Placed text: exact means of its gradient by enumeration, and what it leaves alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unstale.builders import build_old_logps
from unstale.config import ConfigError, CorrectionConfig, ObjectiveConfig, OldLogpsConfig, RunConfig
from unstale.config.options import override
from unstale.config.training import TrainerConfig
from unstale.model.policy import Policy
from unstale.old_logps import OldLogps
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import (
    Batch,
    ContextPiece,
    Piece,
    Placed,
    Provenance,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)
from unstale.rewriting import remove_text
from unstale.testing import episode, nudge, plain_logps, tiny_policy
from unstale.trainer.local import LocalTrainer
from unstale.trainer.placed import guided
from unstale.trainer.rules import LossSpec

WIDE = CorrectionConfig(mode="truncate", high=1e6)
ASKED, HINT = (5, 6, 7), (33, 34)
VOCAB = 64


def make(policy: Policy, objective: ObjectiveConfig, **trainer: Any) -> LocalTrainer:
    """Return a trainer at version 1 whose route has versions 0 and 1."""
    config = RunConfig(
        recipe="",
        max_steps=10,
        correction=WIDE,
        objective=objective,
        trainer=TrainerConfig(**{"optimizer": "SGD", "lr": 1.0, "grad_clip": 1e9} | trainer),
    )
    old = build_old_logps(OldLogpsConfig(route="snapshot_old"), LocalScorer(policy, 1.0, 64))
    old.on_published(live={0})
    nudge(policy, seed=1)
    policy.version = 1
    old.on_published(live={0, 1})
    return LocalTrainer(policy, config, old)


def objective(placed: str, cap: float = 0.0, loss_type: str = "none") -> ObjectiveConfig:
    options: dict[str, Any] = {"placed_cap": cap} if placed == "guided" else {}
    return ObjectiveConfig(loss_type=loss_type, placed=placed, **options)


def scored(pieces: tuple[Piece, ...], advantage: float, number: int) -> ScoredTrajectory:
    task = Task("bandit", "train", 0)
    item = Trajectory(pieces, {"reward": 1.0}, "done", task, seed=number, episode=number)
    return ScoredTrajectory(item, (advantage,))


def gradient(trainer: LocalTrainer, batch: Batch) -> Tensor:
    for minibatch in trainer.prepare(batch):
        trainer.backward(minibatch)
    return -torch.cat([each.grad.flatten() for each in trainer.policy.model.parameters()])


def logps(policy: Policy, context: tuple[int, ...]) -> Tensor:
    """Return the log-probability of each token after a context, `[VOCAB]`."""
    return torch.tensor([plain_logps(policy, [*context, arm])[-1] for arm in range(VOCAB)])


def bandit() -> tuple[Tensor, Tensor]:
    """Return the engine's log-probabilities of all arms after the hint, and the arms' rewards."""
    noise = torch.Generator().manual_seed(3)
    engine = logps(tiny_policy(dtype="float64"), (*ASKED, *HINT))
    engine += 0.3 * torch.randn(VOCAB, generator=noise)
    rewards = (torch.rand(VOCAB, generator=noise) < 0.2).double()
    return engine.log_softmax(-1), rewards


def gradient_of_bandit(placed: str, cap: float = 0.0, *, foreign: bool = False) -> Tensor:
    """Return the mean gradient over all arms, drawn by the engine with the hint, trained without.

    The divisor of the loss is the number of arms. With `foreign`, another policy with the same
    log-probabilities wrote the arms, and had no hint.
    """
    engine, rewards = bandit()
    items = []
    for arm in range(VOCAB):
        text = Sampled((arm,), (engine[arm].item(),), version=0)
        pieces = remove_text((ContextPiece(ASKED), ContextPiece(HINT), text), 3, 5)
        if foreign:
            pieces = (pieces[0], written(text))
        items.append(scored(pieces, VOCAB * engine[arm].exp().item() * rewards[arm].item(), arm))
    batch = collate(items, placed=placed)
    batch = replace(batch, behavior_logp=batch.behavior_logp.double())
    return gradient(make(tiny_policy(dtype="float64"), objective(placed, cap)), batch)


def written(text: Sampled) -> Placed:
    """Return a text as one that another policy wrote, compared with version 0."""
    return Placed(text.tokens, Provenance.FOREIGN, 0, text.behavior_logp)


def true_gradient() -> Tensor:
    policy = tiny_policy(dtype="float64")
    nudge(policy, seed=1)
    logits = policy.model(input_ids=torch.tensor([ASKED]), use_cache=False).logits[0, -1]
    (logits.softmax(-1) @ bandit()[1]).backward()
    return torch.cat([each.grad.flatten() for each in policy.model.parameters()])


def bias(found: Tensor, true: Tensor) -> float:
    return ((found - true).norm() / true.norm()).item()


def test_guided_text_has_the_exact_gradient_and_imitation_another_one() -> None:
    true = true_gradient()
    assert bias(gradient_of_bandit("guided"), true) < 1e-6  # advantages are float32
    assert bias(gradient_of_bandit("guided", foreign=True), true) < 1e-6
    assert 0.5 < bias(gradient_of_bandit("guided", cap=2.0), true) < 1.0
    anchor = gradient_of_bandit("anchor")
    cosine = torch.cosine_similarity(anchor, true, dim=0).item()
    assert cosine == pytest.approx(0.39, abs=0.01)


Text = tuple[int, ...]
Modes = tuple[tuple[str, float], ...]


class Texts(OldLogps):
    """All texts of some tokens of some kinds, and a route that looks up their probabilities.

    The recorded context is one token. The writer had a hint after it, which raises the logit of
    kind 0 by `help`. The policy has moved by `moved` since.
    """

    def __init__(
        self, noise: np.random.Generator, kinds: int, length: int, *, help: float, moved: float
    ) -> None:
        self.kinds = kinds
        self.texts = [*product(range(kinds), repeat=length)]
        self.prefixes = [p for n in range(length) for p in product(range(kinds), repeat=n)]
        self.tables: dict[str, dict[Text, np.ndarray]] = {"old": {}, "hint": {}, "pi": {}}
        for prefix in self.prefixes:
            logits = noise.normal(size=kinds)
            logits[0] -= 2.5 / length
            self.tables["old"][prefix] = softmax(logits)
            self.tables["pi"][prefix] = softmax(logits + moved * noise.normal(size=kinds))
            logits[0] += help
            self.tables["hint"][prefix] = softmax(logits)
        rewards = dict.fromkeys(self.texts, 0.0) | {(0,) * length: 1.0, (1,) * length: 0.3}
        mean = sum(self.chance("pi", text) * rewards[text] for text in self.texts)
        self.advantages = {text: reward - mean for text, reward in rewards.items()}

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.zeros(len(batch.tokens), dtype=torch.float64)
        for start, end in batch.spans():
            tokens = batch.tokens[start:end].tolist()
            table = "hint" if self.kinds + 1 in tokens else "old"
            text = tuple(token for token in tokens if token < self.kinds)
            values[end - len(text) : end] = torch.tensor(self.steps(table, text)).log()
        return values, batch.sampled

    def steps(self, table: str, text: Text) -> list[float]:
        """Return the probability of each token of a text."""
        return [float(self.tables[table][text[:n]][token]) for n, token in enumerate(text)]

    def chance(self, table: str, text: Text) -> float:
        return math.prod(self.steps(table, text))

    def score(self, text: Text, weights: Sequence[float]) -> np.ndarray:
        """Return the weighted sum of the gradients of log pi of a text's tokens, by all logits."""
        found = np.zeros((len(self.prefixes), self.kinds))
        for n, (token, weight) in enumerate(zip(text, weights, strict=True)):
            row = self.prefixes.index(text[:n])
            found[row] -= weight * self.tables["pi"][text[:n]]
            found[row, token] += weight
        return found

    def weights(self, placed: str, cap: float) -> Mapping[Text, Sequence[float]]:
        """Return the weight of each token: D min(Gamma, cap) S if guided, 1 if imitated.

        `foreign` is `guided` for texts that another policy with the same probabilities wrote.
        """
        if placed == "anchor":
            return {text: [1.0] * len(text) for text in self.texts}
        items = []
        for number, text in enumerate(self.texts):
            source = Sampled(text, tuple(np.log(self.steps("hint", text))), 0)
            hinted = (ContextPiece((self.kinds,)), ContextPiece((self.kinds + 1,)), source)
            pieces = remove_text(hinted, 1, 2)
            if placed == "foreign":
                pieces = (hinted[0], written(source))
            items.append(scored(pieces, 1.0, number))
        batch = collate(items, placed="guided")
        assert batch.placed
        rules = LossSpec(WIDE, objective("guided", cap))
        _, factor, log_gamma = guided(batch, batch.placed, self, rules)
        found = {}
        for (start, end), text, one in zip(batch.spans(), self.texts, log_gamma, strict=True):
            gamma = min(math.exp(one), cap or math.inf)
            ratios = np.divide(self.steps("pi", text), self.steps("old", text))
            found[text] = (factor[start + 1 : end].numpy() * gamma * ratios).tolist()
        return found

    def error(self, placed: str, cap: float) -> tuple[float, float, float]:
        """Return relative bias, cosine and variance of the mean gradient of hinted texts."""
        weights = self.weights(placed, cap)
        true: Any = 0.0
        mean: Any = 0.0
        square = 0.0
        for text in self.texts:
            gain, chance = self.advantages[text], self.chance("hint", text)
            found = gain * self.score(text, weights[text])
            true = true + self.chance("pi", text) * gain * self.score(text, [1.0] * len(text))
            mean = mean + chance * found
            square += chance * float((found**2).sum())
        norm = np.linalg.norm
        cosine = float((mean * true).sum() / norm(mean) / norm(true))
        return float(norm(mean - true) / norm(true)), cosine, square - float((mean**2).sum())


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    whole: np.ndarray = powers / powers.sum()
    return whole


MODES: Modes = (("guided", 0.0), ("guided", 2.0), ("anchor", 0.0))


def errors(count: int, *shape: int, **how: float) -> list[tuple[float, float, float]]:
    """Return median bias, mean cosine and median variance of each of `MODES` in random problems."""
    noise = np.random.default_rng(57)
    problems = [Texts(noise, *shape, **how) for _ in range(count)]
    rows = []
    for mode in MODES:
        found = np.array([problem.error(*mode) for problem in problems])
        middle = np.median(found, 0)
        rows.append((float(middle[0]), float(found[:, 1].mean()), float(middle[2])))
    return rows


def test_the_figures_of_the_page_are_those_of_texts_of_one_token() -> None:
    found = errors(200, 8, 1, help=4.0, moved=0.3)
    expected = [(0.0, 1.0, 0.0117), (0.0, 0.998, 0.0108), (8.746, 0.507, 0.2227)]
    for row, known in zip(found, expected, strict=True):
        assert row == pytest.approx(known, abs=6e-4)


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_foreign_text_with_a_known_source_has_the_weights_of_text_with_a_hint(cap: float) -> None:
    """The engine samples from the policy here, so D is 1 and pi / mu is Gamma S in both."""
    problem = Texts(np.random.default_rng(57), 2, 3, help=2.0, moved=0.0)
    found, hinted = problem.weights("foreign", cap), problem.weights("guided", cap)
    for text in problem.texts:
        assert found[text] == pytest.approx(hinted[text], rel=1e-6)
    assert problem.error("foreign", 0.0)[0] < 1e-6


def test_gamma_is_a_product_over_the_text() -> None:
    """With it, longer text has the bias of the S of each token only, as all stale text has."""
    fresh = errors(20, 2, 3, help=2.0, moved=0.0)
    assert fresh[0][0] < 1e-6 and fresh[1][0] > 0.1 and fresh[2][0] > 1.0
    stale, unhinted = (errors(20, 2, 3, help=help, moved=0.3)[0] for help in (2.0, 0.0))
    assert stale[:2] == pytest.approx(unhinted[:2], abs=1e-6) and stale[0] > 0.05


@pytest.mark.costly
def test_the_figures_of_the_page_are_those_of_texts_of_three_tokens() -> None:
    found = errors(100, 2, 3, help=2.0, moved=0.3)
    expected = [(0.18, 0.98), (0.63, 0.86), (5.1, 0.41)]
    for row, known in zip(found, expected, strict=True):
        assert row[:2] == pytest.approx(known, rel=0.02)


def a_batch(placed: str) -> tuple[Batch, list[tuple[Piece, ...]]]:
    """Return a batch of two versions, two edits and other sequences, and the episodes' pieces."""
    plans: list[list[Any]] = [[4, (3, 0), 2, (4, 1), 3, (2, 1)], [3, (5, 1)], [6, (2, 0), 2]]
    items = [episode(i, plan, advantage=(-1.0) ** i) for i, plan in enumerate(plans)]
    first = items[0].trajectory
    asked, own, told, *rest = first.pieces
    hint = ContextPiece((33, 34, 35))
    edited = remove_text((asked, own, told, hint, *rest), 9, 12)
    pieces = [
        (*edited, Placed((40, 41), Provenance.FORCED), Sampled((42,), (-1.5,), 1)),
        items[1].trajectory.pieces,
        remove_text((hint, *items[2].trajectory.pieces), 0, 3),
    ]
    made = [
        replace(item, trajectory=replace(item.trajectory, pieces=each))
        for item, each in zip(items, pieces, strict=True)
    ]
    return collate(made, placed=placed), pieces


def test_each_version_scores_its_text_in_both_contexts() -> None:
    batch, pieces = a_batch("guided")
    versions = [tiny_policy(), tiny_policy()]
    nudge(versions[1], seed=1)
    trainer = make(tiny_policy(), objective("guided", cap=0.7))
    (minibatch,) = trainer.prepare(batch)
    assert batch.placed
    gammas = []
    for row, (start, end) in enumerate(batch.spans()):
        recorded = batch.tokens[start:end].tolist()
        log_gamma, at = 0.0, start
        for piece in pieces[row]:
            stop = at + len(piece.tokens)
            if isinstance(piece, Placed) and piece.edit and piece.source_logp:
                policy = versions[piece.version]
                old = plain_logps(policy, recorded)[at - start : stop - start]
                there = piece.edit.undo(recorded)
                source = plain_logps(policy, there)[at - start + 3 : stop - start + 3]
                torch.testing.assert_close(minibatch.old_logp[at:stop], old.float())
                d = (source - torch.tensor(piece.source_logp)).exp()
                log_gamma += (old - source).sum().item()
                minibatch.factor[at:stop] /= d
            at = stop
        gammas.append(math.exp(log_gamma))
    gamma = torch.tensor([min(each, 0.7) if row != 1 else 1.0 for row, each in enumerate(gammas)])
    of_guided = minibatch.factor[batch.placed.trained]
    torch.testing.assert_close(of_guided, gamma[batch.sequence][batch.placed.trained])
    d = (minibatch.old_logp - batch.behavior_logp).exp()[batch.sampled]
    of_sampled = minibatch.factor[batch.sampled] / d
    torch.testing.assert_close(of_sampled, gamma[batch.sequence][batch.sampled])
    assert not minibatch.factor[~batch.trained].any()
    trainer.backward(minibatch)
    metrics = trainer.metrics()
    texts = [gammas[0], gammas[2]]
    assert metrics["placed/gamma_mean"] == pytest.approx(sum(texts) / 2, rel=1e-4)
    assert metrics["placed/log_gamma_mean"] == pytest.approx(sum(map(math.log, texts)) / 2, 1e-4)
    assert metrics["placed/truncated_share"] == sum(each > 0.7 for each in texts) / 2
    assert metrics["placed/token_share"] == 10 / 19
    assert metrics["placed/trained_share"] == 8 / 10


def test_masked_text_is_context_bit_for_bit_and_has_no_part_in_diagnostics() -> None:
    batch, _ = a_batch("mask")
    assert batch.placed
    plain = make(tiny_policy(), objective("mask", loss_type="ppo_clip"))
    masked = make(tiny_policy(), objective("mask", loss_type="ppo_clip"))
    without = gradient(plain, replace(batch, placed=None))
    assert torch.equal(gradient(masked, batch), without)
    told = {}
    for mode in ("guided", "anchor"):
        trainer = make(tiny_policy(), objective(mode, loss_type="ppo_clip"))
        assert not torch.equal(gradient(trainer, a_batch(mode)[0]), without)
        told[mode] = trainer.metrics()
    for name, value in plain.metrics().items():
        if name.startswith(("correction/", "objective/log_s", "objective/kl", "policy/kl")):
            assert told["anchor"][name] == pytest.approx(value, rel=1e-5, nan_ok=True), name
            weighted = name == "correction/weight_mean"
            assert weighted or told["guided"][name] == pytest.approx(value, rel=1e-5, nan_ok=True)
    assert told["anchor"]["placed/trained_share"] == 1 and told["anchor"]["placed/gamma_mean"] == 1


def test_imitated_text_is_compared_with_the_policy_before_the_batch() -> None:
    batch, _ = a_batch("anchor")
    trainer = make(tiny_policy(), objective("anchor"), minibatches_per_batch=2)
    parts = trainer.prepare(batch)
    before = plain_logps(trainer.policy, batch.tokens[: batch.offsets[1]].tolist())
    trainer.backward(parts[0])
    trainer.step()
    assert parts[0].batch.placed and batch.placed
    where = parts[0].batch.placed.trained[: batch.offsets[1]]
    torch.testing.assert_close(parts[0].old_logp[: batch.offsets[1]][where], before[where].float())
    assert (parts[0].factor[: batch.offsets[1]][where] == 1).all()


def test_the_veto_of_a_sequence_drops_its_placed_text() -> None:
    batch, _ = a_batch("anchor")
    behavior = batch.behavior_logp.clone()
    behavior[batch.sampled.nonzero()[0]] = 5.0  # a token that the trainer finds impossible
    trainer = make(tiny_policy(), objective("anchor"))
    vetoes = replace(WIDE, token_veto_threshold=1e-3)
    trainer.rules = trainer.scoring._rules = replace(trainer.rules, correction=vetoes)
    (minibatch,) = trainer.prepare(replace(batch, behavior_logp=behavior))
    assert batch.placed
    dropped = batch.placed.trained & (minibatch.factor == 0)
    assert dropped.equal(batch.placed.trained & (batch.sequence == 0))


ANCHOR = {"objective.placed": "anchor", "objective.placed_cap": 2.0}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"old_logps.route": "eager"}, "guided needs old_logps.route = snapshot_old"),
        ({"old_logps.route": "interrupt_sync"}, "guided needs old_logps.route = snapshot_old"),
        ({"old_logps.route": "rollout"}, "guided needs old_logps.route = snapshot_old"),
        ({"objective.unit": "turn"}, "guided needs objective.unit = token"),
        ({"objective.loss_type": "vaco"}, "vaco is computed over whole sequences"),
        ({"correction.unit": "turn"}, "guided needs correction.unit = token"),
        ({"correction.normalize": True}, "guided needs correction.normalize = false"),
        ({"engine.keep_cache": True}, "guided needs engine.keep_cache = false"),
        ({"engine.top_p": 0.9}, "guided needs sampling from the whole vocabulary"),
        ({"advantage.estimator": "gae"}, "guided needs another advantage.estimator than gae"),
        ({"trainer.routing_replay": True}, "guided needs trainer.routing_replay = false"),
        ({"techniques": "minpro"}, "guided cannot be used with minpro"),
        ({"techniques": "replay"}, "guided needs no technique that stores groups, such as replay"),
        (ANCHOR | {"old_logps.route": "interp_prox_loglinear"}, "in every training pass"),
        ({"objective.placed": "mask"}, "placed_cap .* objective.placed = guided"),
    ],
)
def test_what_placed_text_would_make_wrong_is_refused_with_the_reason(
    options: dict[str, object], told: str
) -> None:
    fits = {"objective.placed": "guided", "objective.placed_cap": 3.0}
    override(RunConfig(recipe=""), fits)
    with pytest.raises(ConfigError, match=told):
        override(RunConfig(recipe=""), fits | options)
