"""Training examples of the base policy: look-ups, sessions, and demonstrations, correct or faulty.

A small model learns late to copy a number, and later to find the number of a name; with one look-up
per sequence it does not learn it. So the first stage has dozens of look-ups per sequence, with a
loss on all text. Demonstrations add the course of a conversation. Faulty ones add errors that
reinforcement learning can remove.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from unstale.envs import Message
from unstale.envs.desk.customer import Customer
from unstale.envs.desk.database import Desk, User
from unstale.envs.desk.domain import Scenario
from unstale.envs.desk.expert import NO_FAULTS, call_message, expert_replies
from unstale.envs.retail import (
    COLOURS,
    FACTS,
    NAMES,
    PAYMENTS,
    RETAIL,
    WISHES,
    Item,
    Order,
    RetailTasks,
    variants,
)

OTHER_WEIGHT = 0.03
"""Loss weight of text that the assistant did not write."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence; `weights[i]` is the loss weight of `tokens[i]`."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]


def transcript(
    level: int, split: str, index: int, faults: Mapping[str, float] = NO_FAULTS
) -> list[Message]:
    """Return a conversation of the scripted expert, as the environment would play it."""
    facts = RETAIL.scenario(level, split, index)
    desk, customer = facts.desk.copy(), Customer(facts)
    messages = [Message("system", RETAIL.prompt(level)), Message("user", customer.opening())]
    for reply in expert_replies(facts, faults, index):
        messages.append(reply)
        for call in reply.tool_calls:
            messages.append(Message("tool", RETAIL.tools.call(desk, call.name, call.arguments)))
        if not reply.tool_calls:
            messages.append(
                Message("user", customer.answer(reply.content, writes=len(desk.writes)))
            )
    while messages[-1].role != "assistant":
        messages.pop()
    return messages


class Practice:
    """A maker of examples from seeds."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tools = list(RetailTasks(level=1).tools)
        self._speaker = tuple(tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
        self._end = int(tokenizer.eos_token_id)
        pairs = [
            tokenizer.encode(f" {number}", add_special_tokens=False) for number in range(10, 100)
        ]
        self._digits = frozenset(token for tokens in pairs for token in tokens)

    def demonstration(
        self, split: str, index: int, faults: Mapping[str, float] = NO_FAULTS
    ) -> Example:
        return self.conversation(transcript(1, split, index, faults))

    def drill(self, index: int) -> Example:
        """Return plain look-ups: a record, then its names with their numbers, repeated."""
        random = Random(f"drill/{index}")
        facts = RETAIL.scenario(1, "drill", index)
        order = random.choice(list(facts.desk[Order].values()))
        pairs = [(facts.desk[Item][item].name, item) for item in order.items]
        pairs += [(payment.kind, payment.id) for payment in facts.desk[User][order.user].payments]
        text = _read(facts.desk, order)
        if random.random() < 0.5:
            item = facts.desk[Item][order.items[0]]
            pairs += [(other.colour, other.id) for other in variants(facts.desk, item)]
            text += "\n" + _read(facts.desk, item)
        body = ", ".join(f"{name} {number}" for name, number in random.choices(pairs, k=30))
        known = self._tokenizer.encode(f"{text}\n", add_special_tokens=False)
        questions = self._tokenizer.encode(f" {body}", add_special_tokens=False)
        weights = [OTHER_WEIGHT] * len(known) + [
            1.0 if token in self._digits else OTHER_WEIGHT for token in questions
        ]
        return Example((*known, *questions), tuple(weights))

    def dictation(self, index: int, rounds: int = 8) -> Example:
        """Return look-ups in a conversation: a customer names an item, a call has its number."""
        random = Random(f"dictation/{index}")
        facts = RETAIL.scenario(1, "dictation", index)
        order = random.choice(list(facts.desk[Order].values()))
        payments = facts.desk[User][order.user].payments
        messages = [Message("system", RETAIL.prompt(1)), *_opening(facts, order, random)]
        for _ in range(rounds):
            item = facts.desk[Item][random.choice(order.items)]
            messages.append(Message("user", random.choice(FACTS["item"].terse).format(item.name)))
            messages.append(call_message("list_variants", item_id=item.id))
            if random.random() < 0.4:
                payment = random.choice(payments)
                messages.append(
                    Message("user", random.choice(FACTS["payment"].terse).format(payment.kind))
                )
                messages.append(
                    call_message(
                        "return_item", order_id=order.id, item_id=item.id, payment_id=payment.id
                    )
                )
        return self.conversation(messages)

    def session(self, index: int, rounds: int = 3) -> Example:
        """Return a conversation with several requests about one order."""
        random = Random(f"session/{index}")
        facts = RETAIL.scenario(1, "session", index)
        order = random.choice(list(facts.desk[Order].values()))
        goods = random.random() < 0.85
        order = replace(order, status="delivered" if goods else "pending")
        facts.desk.put(order)
        owner = facts.desk[User][order.user]
        facts.desk[User][order.user] = replace(owner, account="personal")
        wishes = [
            random.choice(("return", "exchange")) if goods else "redirect" for _ in range(rounds)
        ]
        messages = [Message("system", RETAIL.prompt(1))]
        for place, wish in enumerate(wishes):
            messages.append(Message("user", random.choice(WISHES[wish].terse)))
            if place == 0:
                messages += _opening(facts, order, random)
            messages += _round(facts, order, wish, random)
        return self.conversation(messages)

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


def corpus(count: int) -> Iterator[str]:
    """Yield text to train the tokenizer on, mostly of level 1, split at special tokens."""
    for index in range(count):
        for level in (1,) * 10 + (2, 3):
            for message in transcript(level, "corpus", index * 12 + level):
                yield message.role + "\n"
                yield message.content
                for call in message.tool_calls:
                    arguments = json.dumps(call.arguments)
                    yield f'\n{{"name": "{call.name}", "arguments": {arguments}}}\n'
    words = [
        *NAMES,
        *COLOURS,
        *PAYMENTS[1:],
        *RETAIL.tools.tools,
        PAYMENTS[0],
        "sale",
        "final",
        *map(str, range(10, 100)),
    ]
    for _ in range(2 * count):
        yield "".join(f" {word}" for word in words)
        yield "business"
        yield "personal"


def _read(desk: Desk, record: Order | Item) -> str:
    """Return the answer of the tool that reads an order, or the other variants of an item."""
    name, key = (
        ("get_order", "order_id") if isinstance(record, Order) else ("list_variants", "item_id")
    )
    return RETAIL.tools.call(desk, name, {key: record.id})


def _opening(facts: Scenario, order: Order, random: Random) -> list[Message]:
    answer = random.choice(FACTS["order"].terse).format(order.id)
    return [
        Message("assistant", FACTS["order"].question),
        Message("user", answer),
        call_message("get_order", order_id=order.id),
        Message("tool", _read(facts.desk, order)),
    ]


def _question(kind: str, what: str, random: Random) -> list[Message]:
    answer = random.choice(FACTS[kind].terse).format(what)
    return [Message("assistant", FACTS[kind].question), Message("user", answer)]


def _round(facts: Scenario, order: Order, wish: str, random: Random) -> list[Message]:
    """Return the messages of one request, from its details to its confirmation."""
    desk = facts.desk
    payments = desk[User][order.user].payments
    if wish == "redirect":
        point = str(random.randrange(10, 100))
        call = call_message("redirect_order", order_id=order.id, point_id=point)
        return [*_question("point", point, random), call, *_closing("ok", "Done.")]
    item = desk[Item][random.choice(order.items)]
    opened = _question("item", item.name, random)
    if wish == "exchange":
        new = random.choice(variants(desk, item))
        listed = [
            call_message("list_variants", item_id=item.id),
            Message("tool", _read(desk, item)),
        ]
        call = call_message("exchange_item", order_id=order.id, item_id=item.id, new_item_id=new.id)
        return [
            *opened,
            *listed,
            *_question("colour", new.colour, random),
            call,
            *_closing("ok", "Done."),
        ]
    if item.terms == "final":
        return [
            *opened,
            call_message("refuse", order_id=order.id, reason="final"),
            *_closing("noted", "Sorry."),
        ]
    payment = random.choice(payments)
    if item.terms == "sale":
        payment = next(other for other in payments if other.kind == "gift")
    else:
        opened += _question("payment", payment.kind, random)
    call = call_message("return_item", order_id=order.id, item_id=item.id, payment_id=payment.id)
    return [*opened, call, *_closing("ok", "Done.")]


def _closing(answer: str, last: str) -> list[Message]:
    return [Message("tool", answer), Message("assistant", last)]


def _as_dict(message: Message) -> dict[str, Any]:
    calls = [
        {"function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call in message.tool_calls
    ]
    return {"role": message.role, "content": message.content, "tool_calls": calls}
