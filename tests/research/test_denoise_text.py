"""Texts by masked diffusion: growing steps, a late end, exact log-probabilities, and learning."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from itertools import permutations, product

import pytest
import torch
from torch import Tensor, nn

from unstale.cli.main import main
from unstale.research.denoise.steps import Plan, Sampler, Steps
from unstale.research.denoise.text import (
    EOS,
    LENGTH,
    LETTERS,
    MASK,
    PAD,
    Likelihood,
    TextModel,
    Texts,
    eos_factors,
    lengths,
    reversed_words,
    step_sizes,
    words,
)
from unstale.research.denoise.train import DenoiseOptions, evaluate, train

WORD = torch.tensor([1, 3, 2, 3, 1])


def model_of(seed: int) -> nn.Module:
    """Return a network in float64 whose probabilities are far from equal."""
    torch.manual_seed(seed)
    network = TextModel(8)
    with torch.no_grad():
        network.head.weight.mul_(4)
    return network.double()


def test_steps_decode_powers_of_two_or_equal_numbers_or_one() -> None:
    assert step_sizes("ascending", 8) == [1, 2, 5]
    assert step_sizes("ascending", 128) == [1, 2, 4, 8, 16, 32, 65]
    assert step_sizes("equal", 8) == [3, 3, 2]
    assert step_sizes("one", 8) == [1] * 8


def test_factors_of_the_end_grow_to_one() -> None:
    """The numbers are those of the authors' code, for S ascending and for S other steps."""
    found = eos_factors("ascending", 8, None)
    assert found == pytest.approx([0.01 + 0.99 * share for share in (1 / 8, 3 / 8, 7 / 8)])
    assert eos_factors("equal", 8, None) == pytest.approx([0.4, 0.7, 1.0])
    assert eos_factors("one", 8, 0.3) == pytest.approx([0.3 + 0.1 * step for step in range(8)])
    assert eos_factors("ascending", 8, 1.0) == [1.0] * 3


def test_words_are_held_out_and_a_text_is_right_up_to_its_end() -> None:
    trained, held_out = (
        {tuple(row) for rows in words(held_out=each) for row in rows.tolist()}
        for each in (False, True)
    )
    assert not trained & held_out
    assert len(trained) + len(held_out) == LETTERS**3 + LETTERS**4 + LETTERS**5
    word = torch.tensor([[1, 3, 2, 4, PAD]] * 4)
    assert reversed_words(word).tolist() == [[4, 2, 3, 1, EOS, EOS, EOS, EOS]] * 4
    text = torch.tensor(
        [
            [4, 2, 3, 1, EOS, EOS, EOS, EOS],
            [4, 2, 3, 1, EOS, 0, EOS, 1],
            [4, 2, 3, EOS, EOS, EOS, EOS, EOS],
            [4, 2, 3, 1, 1, EOS, EOS, EOS],
        ]
    )
    rewards = Texts(start=0).rewards(text[None], word)
    assert rewards["reward"].tolist() == [1, 1, 0, 0]
    assert rewards["length"].tolist() == [4, 4, 3, 5]


class Trap(nn.Module):
    """A model of texts of four letters, where `EOS` is likely unless a letter stands before it."""

    def forward(self, word: Tensor, text: Tensor) -> Tensor:
        before = torch.cat([torch.full((len(text), 1), MASK), text[:, :-1]], 1)
        letter = torch.where(before < LETTERS, 0.9, 0.35)
        letter[:, 0] = 0.65
        letter[:, 4:] = 0.01
        spread = torch.tensor([0.91, *[0.01] * (EOS - 1)]) * letter[:, :, None]
        return torch.cat([spread, 1 - letter[:, :, None]], 2).log()


def test_without_eoser_likely_ends_come_first_and_the_text_is_short() -> None:
    found: dict[float | None, float] = {}
    for eoser in (1.0, None):
        model = Texts(schedule="one", eoser=eoser, start=0)
        found[eoser] = evaluate(model, Trap(), 0, None)["length"]
    assert found == {1.0: 1, None: 4}


def actions(text: Tensor, size: int) -> Iterator[Tensor]:
    """Yield every action that decodes `size` of the masked places of a text."""
    for chosen in permutations((text == MASK).nonzero().flatten().tolist(), size):
        for tokens in product(range(EOS + 1), repeat=size):
            after, order = text.clone(), torch.full((LENGTH,), -1)
            for rank, (place, token) in enumerate(zip(chosen, tokens, strict=True)):
                after[place], order[place] = token, rank
            yield torch.stack([after, order])


def steps_of(text: Tensor, found: list[Tensor], place: int) -> Steps:
    """Return steps at a place of the schedule. `text` is one state, or one for each action."""
    count = len(found)
    states = text.expand(count, -1)
    return Steps(states, torch.stack(found), torch.full((count,), place), WORD.expand(count, -1))


TEXT = torch.tensor([0, MASK, 1, MASK, EOS, MASK, EOS, EOS])
"""A text before the second of the steps 1, 2, 5, with fewer masked places than then."""


def test_the_probabilities_of_all_steps_are_1_in_all() -> None:
    model, network = Texts(start=0), model_of(0)
    found = list(actions(TEXT, 2))
    steps = steps_of(TEXT, found, 1)
    logp = model.logp(network, steps)
    assert len(found) == 6 * (EOS + 1) ** 2 and logp.exp().sum().item() == pytest.approx(
        1, abs=1e-12
    )
    random = torch.Generator().manual_seed(0)
    for _ in range(20):
        noise = model.noise(random)[None]
        action, drawn = model.draw(network, steps_of(TEXT, found[:1], 1), noise)
        same = torch.tensor([torch.equal(action[0], each) for each in found])
        assert drawn.item() == pytest.approx(logp[same].item(), abs=1e-12)


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("likelihood", ["trajectory", "tokens", "one-step"])
def test_only_recorded_states_give_the_exact_gradient(likelihood: Likelihood) -> None:
    """Steps were drawn with other weights, and are weighted by their ratio of probabilities."""
    model, exact = Texts(likelihood=likelihood, start=0), Texts(start=0)
    behavior, now = model_of(0), model_of(1)
    pairs = [(first, last) for first in actions(TEXT, 2) for last in actions(first[0], 1)]
    firsts, lasts = map(list, zip(*pairs, strict=True))
    steps = steps_of(TEXT, firsts, 1), steps_of(torch.stack(firsts)[:, 0], lasts, 2)
    text = torch.stack(lasts)[:, 0]
    reward = (text[:, 1] + 2 * text[:, 5]).double()

    def whole(policy: Texts, network: nn.Module) -> Tensor:
        return sum((policy.logp(network, each) for each in steps), torch.zeros(()))

    true = (whole(exact, now).exp() * reward).sum()
    logp = whole(model, now)
    with torch.no_grad():
        ratio = logp - whole(model, behavior)
        weight = (whole(exact, behavior) + ratio).exp() * reward
    weighted = (weight * logp).sum()
    expected, found = (
        torch.cat(
            [
                each.flatten()
                for each in torch.autograd.grad(value, list(now.parameters()), retain_graph=True)
            ]
        )
        for value in (true, weighted)
    )
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < 1e-9 if likelihood == "trajectory" else error > 1e-3


def test_recorded_steps_are_those_of_the_trajectory_and_d_is_1() -> None:
    model, network = Texts(start=0), model_of(0)
    sampler = Sampler(model, Plan(size=3), 0)
    sampler.load(0, network, network)
    group = asyncio.run(sampler.group(0, 7))
    for each in group.trajectories:
        (piece,) = each.pieces
        steps = Steps.stack(sampler.tape.take(piece.tokens))
        with torch.no_grad():
            old_logp = model.logp(network, steps).tolist()
        assert piece.behavior_logp == pytest.approx(old_logp, abs=1e-12)
        assert (steps.state[0] == MASK).all()
        assert torch.equal(steps.state[1:], steps.action[:-1, 0])
        assert (steps.state == MASK).sum(1).tolist() == [8, 7, 5]
        assert (steps.action[-1, 0] != MASK).all()
        assert each.facts["length"] == lengths(steps.action[-1:, 0]).item()


class Longer(Texts):
    """A policy whose reward is the length, which a new network varies."""

    def rewards(self, path: Tensor, context: Tensor) -> Mapping[str, Tensor]:
        return {"reward": lengths(path[-1]).float()}


@pytest.mark.parametrize("likelihood", ["trajectory", "one-step"])
def test_d_is_1_for_steps_of_all_versions(likelihood: Likelihood) -> None:
    options = DenoiseOptions(steps=4, groups=2, group_size=4, engine="float32", max_staleness=1)
    rows = train(Longer(likelihood=likelihood, start=0, width=8), options, 0).rows
    assert max(row["log_d_abs_mean"] for row in rows) < 1e-5
    assert max(row["log_s_abs_mean"] for row in rows) > 1e-4


@pytest.mark.costly
def test_growing_steps_with_a_late_end_learn_to_write_whole_words() -> None:
    result = train(Texts(), DenoiseOptions(steps=24, groups=8, group_size=8), 0)
    assert result.after["reward"] > result.before["reward"] + 0.2
    assert result.after["length"] > result.before["length"] + 0.3


def test_the_command_trains_and_refuses_options_of_other_policies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Texts, "network", lambda self, seed: TextModel(8))
    options = "denoise text --schedule one --eoser 0.5 --likelihood one-step --steps 1 --groups 1"
    with pytest.raises(SystemExit) as ended:
        main([*options.split(), "--group-size", "2", "--likeliest", "--json"])
    assert ended.value.code == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert set(run["after"]) == {"reward", "length"} and run["steps"]["engine"] == 2 * LENGTH
    with pytest.raises(SystemExit):
        main(["denoise", "plans", "--eoser", "0.5"])
    assert "--eoser and --likelihood are only of text, got plans" in capsys.readouterr().err
