"""Training examples of a base policy: look-ups, and demonstrations that are correct or faulty.

A small model learns late to copy a number, and later to find the number of a name; with one look-up
per sequence it does not learn it. So the first stage has dozens of look-ups per sequence, with a
loss on all text. Demonstrations add the course of a conversation. Faulty ones add errors that
reinforcement learning can remove.

All examples of a desk come from its `Domain`. The policy `base` was made with other examples,
in `tools.base_policy.retail`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.base_policy.tokenizer import PIECES
from unstale.envs import Message
from unstale.envs.desk.customer import Customer
from unstale.envs.desk.database import DeskError
from unstale.envs.desk.domain import Call, Domain, Scenario
from unstale.envs.desk.expert import NO_FAULTS, call_message, expert_replies

OTHER_WEIGHT = 0.03
"""Loss weight of text that the assistant did not write."""
FAULT_RATE = 0.7
"""Share of decisions that a faulty demonstration gets wrong, for each rule. It is above one half,
so that the greedy policy fails too, and below 1, so that reinforcement learning sees correct
behaviour.
"""
CANCEL_FAULT_RATE = 0.1
"""The same for a refusal to cancel, the only fault of some requests."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence; `weights[i]` is the loss weight of `tokens[i]`."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]


def transcript(
    domain: Domain, level: int, split: str, index: int, faults: Mapping[str, float] = NO_FAULTS
) -> list[Message]:
    """Return a conversation of the scripted expert, as the environment would play it."""
    return _conversation(domain.scenario(level, split, index), faults, index)


def faults_of(domain: Domain) -> dict[str, float]:
    """Return the fault rates of the demonstrations of a desk, by rule."""
    rates = dict.fromkeys(("account", *domain.faults), FAULT_RATE)
    return rates | {rule: CANCEL_FAULT_RATE for rule in rates if rule == "cancel"}


class ConversationExamples:
    """A maker of examples from conversations with these tools."""

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools)
        self._speaker = tuple(tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
        self._end = int(tokenizer.eos_token_id)

    def conversation(self, messages: list[Message]) -> Example:
        text = self.render(messages)
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        weights, speaking = [], False
        for place, token in enumerate(tokens):
            weights.append(1.0 if speaking else OTHER_WEIGHT)
            speaking = tokens[max(place - 1, 0) : place + 1] == self._speaker or (
                speaking and token != self._end
            )
        return Example(tokens, tuple(weights))

    def render(self, messages: list[Message]) -> str:
        rendered = [_as_dict(message) for message in messages]
        return str(self._tokenizer.apply_chat_template(rendered, tools=self._tools, tokenize=False))


class Practice(ConversationExamples):
    """A maker of examples of a desk from seeds."""

    def __init__(self, tokenizer: Any, domain: Domain, faults: Mapping[str, float]) -> None:
        super().__init__(tokenizer, list(map(domain.tools.schema, domain.tool_names(1))))
        self._domain = domain
        self._faults = faults
        pairs = [
            tokenizer.encode(f" {number}", add_special_tokens=False) for number in range(10, 100)
        ]
        self._digits = frozenset(token for tokens in pairs for token in tokens)

    def demonstration(self, split: str, index: int, *, faulty: bool = False) -> Example:
        """Return a conversation of the expert, which ignores rules if `faulty`."""
        faults = self._faults if faulty else NO_FAULTS
        return self.conversation(transcript(self._domain, 1, split, index, faults))

    def drill(self, index: int) -> Example:
        """Return plain look-ups: records, then their names with their numbers, repeated."""
        random = Random(f"drill/{index}")
        records = self._records(transcript(self._domain, 1, "drill", index))
        pairs = [pair for group in _groups(records.values()) for pair in group.items()]
        return self.look_ups("\n".join(records.values()), random.choices(pairs, k=30))

    def dictation(self, index: int, rounds: int = 6) -> Example:
        """Return look-ups in a conversation: the customer names things, a call has their numbers.

        It begins as a demonstration. After the last record, it repeats the questions and the last
        call of the demonstration, for other things of the same records.
        """
        random = Random(f"dictation/{index}")
        scenario, asked, call = self._with_numbers(index)
        messages = _conversation(scenario, NO_FAULTS, index)
        records = self._records(messages)
        groups = _groups(records.values())
        del messages[max(records) + 1 :]
        for _ in range(rounds):
            messages += self._round(scenario, asked, call, (random, groups))
        return self.conversation(messages)

    def session(self, index: int, requests: int = 3) -> Example:
        """Return demonstrations of several requests in one conversation, each about its case."""
        messages: list[Message] = []
        for place in range(requests):
            more = transcript(self._domain, 1, f"session {place}", index)
            messages += more[1:] if messages else more
        return self.conversation(messages)

    def _with_numbers(self, index: int) -> tuple[Scenario, list[str], Call]:
        """Return a scenario whose last call has numbers that the expert asks for.

        The expert's questions and its last call are returned, too.
        """
        attempt = 0
        while True:
            scenario = self._domain.scenario(1, f"dictation {attempt}", index)
            steps = self._domain.steps(scenario, scenario.requests[0], lambda rule: False)
            asked, call = [step for step in steps if isinstance(step, str)], steps[-1]
            assert isinstance(call, tuple)
            numbers = [key for key, value in call[1].items() if value.isdigit()]
            if asked and len(numbers) > 1:  # one is the number of the case
                return scenario, asked, call
            attempt += 1

    def _round(
        self,
        scenario: Scenario,
        asked: Sequence[str],
        call: Call,
        draw: tuple[Random, Sequence[Mapping[str, str]]],
    ) -> Iterator[Message]:
        """Yield the questions of `asked`, answers about other things, and the call for them.

        `draw` has the random numbers, and the numbers in the records by name, for each list.
        """
        (random, groups), facts = draw, self._domain.facts
        known = scenario.known_facts(scenario.requests[0])
        changed = dict(call[1])
        for kind in asked:
            word = known[kind]
            for key, number in call[1].items():
                group = next((each for each in groups if each.get(known[kind]) == number), None)
                if group:
                    word, changed[key] = random.choice(list(group.items()))
                elif number == known[kind] and number.isdigit():
                    word = changed[key] = str(random.randrange(10, 100))
            yield Message("assistant", facts[kind].question)
            yield Message("user", random.choice(facts[kind].terse).format(word))
        yield call_message(call[0], **changed)

    def _records(self, messages: Sequence[Message]) -> dict[int, str]:
        """Return the answers of the tools that read, by their place in a conversation."""
        tools = self._domain.tools.tools
        return {
            place + 1: messages[place + 1].content
            for place, message in enumerate(messages[:-1])
            if message.tool_calls and not tools[message.tool_calls[0].name].writes
        }

    def look_ups(self, text: str, pairs: Iterable[tuple[str, str]]) -> Example:
        """Return a text, and names with their numbers, which have the full loss weight."""
        body = ", ".join(f"{name} {number}" for name, number in pairs)
        known = self._tokenizer.encode(f"{text}\n", add_special_tokens=False)
        questions = self._tokenizer.encode(f" {body}", add_special_tokens=False)
        weights = [OTHER_WEIGHT] * len(known) + [
            1.0 if token in self._digits else OTHER_WEIGHT for token in questions
        ]
        return Example((*known, *questions), tuple(weights))


def corpus(domains: Sequence[Domain], count: int) -> Iterator[str]:
    """Yield text of level 1 to train a tokenizer on, split at special tokens.

    Every word and number is repeated, so that it becomes one token.
    """
    pieces = {f" {number}" for number in range(10, 100)}
    for domain in domains:
        pieces.update(f" {name}" for name in domain.tool_names(1))
        for text in texts(domain, count):
            yield text
            pieces.update(re.findall(PIECES, text))
    for _ in range(count):
        yield from sorted(pieces)


def texts(domain: Domain, count: int, levels: Sequence[int] = (1,)) -> Iterator[str]:
    """Yield the texts of `count` conversations of the expert for each item of `levels`."""
    for index in range(count):
        for level in levels:
            for message in transcript(domain, level, "corpus", index * 12 + level):
                yield message.role + "\n"
                yield message.content
                for call in message.tool_calls:
                    arguments = json.dumps(call.arguments)
                    yield f'\n{{"name": "{call.name}", "arguments": {arguments}}}\n'


def _conversation(scenario: Scenario, faults: Mapping[str, float], seed: int) -> list[Message]:
    domain, desk, customer = scenario.domain, scenario.desk.copy(), Customer(scenario)
    messages = [
        Message("system", domain.prompt(scenario.level)),
        Message("user", customer.opening()),
    ]
    for reply in expert_replies(scenario, faults, seed):
        messages.append(reply)
        for call in reply.tool_calls:
            try:
                answer = domain.tools.call(desk, call.name, call.arguments)
            except DeskError as error:  # two wrong decisions can make a call impossible
                answer = f"Error: {error}"
            messages.append(Message("tool", answer))
        if not reply.tool_calls:
            messages.append(
                Message("user", customer.answer(reply.content, writes=len(desk.writes)))
            )
    while messages[-1].role != "assistant":
        messages.pop()
    return messages


def _groups(records: Iterable[str]) -> list[dict[str, str]]:
    """Return the numbers in each list of some records, by name."""
    lists = [part for record in records for part in record.split(";")]
    return [group for part in lists if (group := dict(_NAMED.findall(part)))]


_NAMED = re.compile(r"([A-Za-z]+) (\d\d)\b")


def _as_dict(message: Message) -> dict[str, Any]:
    calls = [
        {"function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call in message.tool_calls
    ]
    return {"role": message.role, "content": message.content, "tool_calls": calls}
