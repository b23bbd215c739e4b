"""Test the hidden states that techniques read.

They are those of the model's own forward pass, whatever is packed together, with adapters, and with
layers that are computed again. They are means over the last tokens of prompt and replies. Nothing
is computed unless a technique reads them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from unstale.builders import build_old_logps
from unstale.config import ConfigError, OldLogpsConfig, RunConfig, TrainerConfig
from unstale.model.hidden import find_layer
from unstale.model.lora import Lora
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import Batch, Group, collate
from unstale.techniques.hooks import HiddenStates, StatesQuery, Techniques
from unstale.testing import episode, nudge, tiny_policy
from unstale.trainer.hidden_states import last_tokens, statistics
from unstale.trainer.local import LocalTrainer

PLANS: Sequence[list[Any]] = (
    [22, (1, 0), (1, 0), 2, (2, 1), (1, 2)],
    [22, (2, 0)],
    [2, (1, 0)],
    [(2, 0)],
    [3],
)
"""Context tokens, and (tokens, version). The first two sequences have the same prompt."""


def a_batch() -> Batch:
    made = [episode(i, plan) for i, plan in enumerate(PLANS)]
    prompt = made[0].trajectory.pieces[0]
    shared = made[1].trajectory
    made[1] = replace(made[1], trajectory=replace(shared, pieces=(prompt, *shared.pieces[1:])))
    return collate(made)


class Reads:
    """A technique that keeps what it reads."""

    query = StatesQuery(depth=0.5, tokens=2)

    def __init__(self) -> None:
        self.found: list[tuple[Sequence[Group], HiddenStates]] = []

    def read_states(self, groups: Sequence[Group], states: HiddenStates) -> None:
        self.found.append((groups, states))


def trainer(policy: Policy, *techniques: object, **options: Any) -> LocalTrainer:
    config = RunConfig(recipe="", trainer=TrainerConfig(**options))
    old = build_old_logps(OldLogpsConfig(route="current_recompute"), LocalScorer(policy, 1.0, 64))
    named = Techniques({str(number): each for number, each in enumerate(techniques)})
    return LocalTrainer(policy, config, old, techniques=named)


def test_the_last_tokens_of_the_prompt_and_of_each_reply_are_marked() -> None:
    """A reply that an update interrupted is one reply. The last sequence is a prompt alone."""
    marks = last_tokens(a_batch(), 2)
    found = [
        [(marks[start:end, mark].nonzero().squeeze(1)).tolist() for mark in (0, 1)]
        for start, end in a_batch().spans()
    ]
    assert found == [
        [[20, 21], [22, 23, 27, 28]],
        [[20, 21], [22, 23]],
        [[0, 1], [2]],
        [[], [0, 1]],
        [[1, 2], []],
    ]


def test_statistics_of_entropies_by_hand() -> None:
    batch = collate([episode(0, [1, (1, 0), (1, 0)]), episode(1, [1])])
    found = statistics(torch.tensor([0.0, 1.0, 3.0, 0.0]), batch)
    assert found[0].tolist() == [2.0, 1.0, 3.0] and found[1].isnan().all()


def by_hand(policy: Policy, batch: Batch, layers: int, count: int) -> tuple[Tensor, Tensor]:
    """Return means after some layers and statistics of entropies, from one sequence at a time."""
    inner = policy.model.base_model.layers[layers - 1]
    states: list[Tensor] = []
    handle = inner.register_forward_hook(lambda module, inputs, output: states.append(output))
    means = torch.full((batch.num_sequences, 2, 32), torch.nan, dtype=torch.float64)
    entropy = torch.zeros(len(batch.tokens), dtype=torch.float64)
    marks = last_tokens(batch, count)
    for i, (start, end) in enumerate(batch.spans()):
        with torch.no_grad():
            out = policy.model(input_ids=batch.tokens[None, start:end], use_cache=False)
        logps = out.logits[0].double().log_softmax(-1)
        entropy[start + 1 : end] = -(logps.exp() * logps).sum(-1)[:-1]
        hidden = states.pop()[0]
        for mark in (0, 1):
            if marks[start:end, mark].any():
                means[i, mark] = hidden[marks[start:end, mark]].double().mean(0)
    handle.remove()
    sampled_first = [start for start, _ in batch.spans() if batch.sampled[start]]
    entropy[sampled_first] = 0.0
    return means, statistics(entropy, batch)


LORA = Lora(rank=2, alpha=4.0, targets="all-linear", seed=0)


@pytest.mark.parametrize(
    ("lora", "options"),
    [
        (None, {}),
        (None, {"share_prompts": False}),
        (None, {"max_tokens_per_microbatch": 16}),
        (None, {"gradient_checkpointing": True}),
        (LORA, {"lora_rank": 2}),
    ],
)
def test_hidden_states_are_those_of_the_model_however_it_is_run(
    lora: Lora | None, options: dict[str, Any]
) -> None:
    plain = tiny_policy(dtype="float64", lora=lora)
    nudge(plain, seed=3)
    batch = a_batch()
    for depth, layers in ((0.01, 1), (0.5, 1), (0.51, 2)):
        found = trainer(plain, **options).hidden_states(batch, StatesQuery(depth, 3))
        wanted, entropy = by_hand(plain, batch, layers, 3)
        for values, right in (
            (found.prompt, wanted[:, 0]),
            (found.reply, wanted[:, 1]),
            (found.entropy, entropy),
        ):
            torch.testing.assert_close(values, right.float(), equal_nan=True)
    shared = options.get("share_prompts", True) and "max_tokens_per_microbatch" not in options
    assert found.forward_tokens == len(batch.tokens) - 22 * shared


def test_hidden_states_follow_the_weights_and_leave_no_hook_and_no_gradient() -> None:
    policy = tiny_policy()
    made = trainer(policy)
    hooks = list(find_layer(policy.model, 0.5)._forward_hooks)
    before = made.hidden_states(a_batch(), StatesQuery(0.5, 2))
    nudge(policy, seed=1)
    after = made.hidden_states(a_batch(), StatesQuery(0.5, 2))
    assert not torch.equal(before.reply[0], after.reply[0])
    assert not after.reply.requires_grad
    assert list(find_layer(policy.model, 0.5)._forward_hooks) == hooks
    assert all(each.grad is None for each in policy.model.parameters())


def test_techniques_read_the_finished_episodes_in_order_also_those_left_out() -> None:
    """Of an episode whose main conversation has no reply, they read its first branch."""
    reads = Reads()
    made = trainer(tiny_policy(dtype="float64"), reads)
    episodes = [episode(i, plan).trajectory for i, plan in enumerate(PLANS[:4])]
    led = replace(episode(9, [3]).trajectory, branches=(episodes[2],))
    groups = [
        Group(episodes[0].task, (episodes[0],), unused=(episodes[1],)),
        Group(led.task, (led, episodes[3])),
    ]
    made.techniques.read_states(groups, made.hidden_states)
    ((seen, states),) = reads.found
    assert seen is groups
    batch = collate([episode(i, plan) for i, plan in enumerate(PLANS[:4])])
    wanted = made.hidden_states(batch, Reads.query)
    torch.testing.assert_close(states.reply, wanted.reply)
    torch.testing.assert_close(states.prompt, wanted.prompt, equal_nan=True)


def test_a_model_without_a_list_of_its_layers_is_refused_before_the_run() -> None:
    policy = tiny_policy()
    policy.model.config.num_hidden_layers = 3
    with pytest.raises(ConfigError, match="its 3 layers are not one list"):
        trainer(policy, Reads())
    trainer(policy)
