"""A program for Tinker's client, which runs in an environment that has the package `tinker`.

It trains by supervised steps, then by reinforcement learning with importance sampling, and prints
what it measured as JSON. It knows nothing of the service but the address in the environment.
"""

import json
import sys

import tinker
from tinker import types

TEXT = "the order is on its way and will arrive tomorrow"
WANTED = "order"
GROUP = 32


def tokens_of(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def learn_text(training: tinker.TrainingClient, tokens: list[int]) -> list[float]:
    """Train on a text. Return the loss of each step."""
    data = types.Datum(
        model_input=tokens_of(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    losses = []
    for _ in range(24):
        passed = training.forward_backward([data], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=5e-3))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def learn_word(
    training: tinker.TrainingClient, prompt: list[int], wanted: list[int]
) -> tuple[list[float], float]:
    """Reinforce tokens of a word. Return the reward of each step, and the largest |logp error|.

    The error compares log-probabilities of the engine with those of the trainer.
    """
    rewards, error = [], 0.0
    for step in range(12):
        sampler = training.save_weights_and_get_sampling_client().result()
        options = types.SamplingParams(max_tokens=8, stop=[], seed=step)
        replies = sampler.sample(tokens_of(prompt), GROUP, options).result().sequences
        each = [sum(token in wanted for token in reply.tokens) / 8 for reply in replies]
        mean = sum(each) / GROUP
        rewards.append(mean)
        data = []
        for reply, reward in zip(replies, each, strict=True):
            skipped = len(prompt) - 1
            data.append(
                types.Datum(
                    model_input=tokens_of([*prompt, *reply.tokens[:-1]]),
                    loss_fn_inputs={
                        "target_tokens": [*prompt[1:], *reply.tokens],
                        "logprobs": [*[0.0] * skipped, *reply.logprobs],
                        "advantages": [*[0.0] * skipped, *[reward - mean] * len(reply.tokens)],
                    },
                )
            )
        passed = training.forward_backward(data, "importance_sampling").result()
        for output, reply in zip(passed.loss_fn_outputs, replies, strict=True):
            logps = output["logprobs"].data[len(prompt) - 1 :]
            error = max(error, *(abs(a - b) for a, b in zip(logps, reply.logprobs, strict=True)))
        training.optim_step(types.AdamParams(learning_rate=5e-3)).result()
    return rewards, error


def main(model: str) -> None:
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=model, rank=8, seed=1).result()
    tokenizer = training.get_tokenizer()
    tokens = tokenizer.encode(TEXT)
    losses = learn_text(training, tokens)
    path = training.save_weights_for_sampler("learnt").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    before = sampler.compute_logprobs(tokens_of(tokens)).result()
    rewards, error = learn_word(training, tokens[:4], tokenizer.encode(" " + WANTED))
    after = sampler.compute_logprobs(tokens_of(tokens)).result()
    state = training.save_state("end").result().path
    loaded = service.create_training_client_from_state_with_optimizer(state).result()
    found = {
        "losses": losses,
        "rewards": rewards,
        "error": error,
        "is_unchanged": before == after,
        "rank": loaded.get_info().lora_rank,
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
