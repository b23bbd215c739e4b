"""Training examples of the base policy: look-ups, sessions, and demonstrations, correct or faulty.

A small model learns late to copy a number, and later to find the number of a name; with one look-up
per sequence it does not learn it. So the first stage has dozens of look-ups per sequence, with a
loss on all text. Demonstrations add the course of a conversation. Faulty ones add errors that
reinforcement learning can remove.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from unstale.envs import Message
from unstale.envs.retail import RetailTasks, system_text
from unstale.envs.retail.customer import Customer
from unstale.envs.retail.database import Order
from unstale.envs.retail.records import order_record, variants_record
from unstale.envs.retail.rules import NO_FAULTS, Faults, call_message, expert_replies
from unstale.envs.retail.tasks import Scenario, scenario
from unstale.envs.retail.tools import ARGUMENTS, call_tool
from unstale.envs.retail.wording import COLOURS, NAMES, PAYMENTS, QUESTIONS, TERSE_ANSWERS, WISHES

OTHER_WEIGHT = 0.03
"""Loss weight of text that the assistant did not write."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence; `weights[i]` is the loss weight of `tokens[i]`."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]


def transcript(level: int, split: str, index: int, faults: Faults = NO_FAULTS) -> list[Message]:
    """Return a conversation of the scripted expert, as the environment would play it."""
    facts = scenario(level, split, index)
    desk, customer = facts.desk.copy(), Customer(facts)
    messages = [Message("system", system_text(level)), Message("user", customer.opening())]
    for reply in expert_replies(facts, faults, index):
        messages.append(reply)
        for call in reply.tool_calls:
            messages.append(Message("tool", call_tool(desk, call.name, call.arguments)))
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

    def demonstration(self, split: str, index: int, faults: Faults = NO_FAULTS) -> Example:
        return self.conversation(transcript(1, split, index, faults))

    def drill(self, index: int) -> Example:
        """Return plain look-ups: a record, then its names with their numbers, repeated."""
        random = Random(f"drill/{index}")
        facts = scenario(1, "drill", index)
        order = random.choice(list(facts.desk.orders.values()))
        pairs = [(facts.desk.items[item].name, item) for item in order.items]
        pairs += [(payment.kind, payment.id) for payment in facts.desk.users[order.user].payments]
        text = order_record(facts.desk, order)
        if random.random() < 0.5:
            item = facts.desk.items[order.items[0]]
            pairs += [(other.colour, other.id) for other in facts.desk.variants(item)]
            text += "\n" + variants_record(facts.desk, item)
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
        facts = scenario(1, "dictation", index)
        order = random.choice(list(facts.desk.orders.values()))
        payments = facts.desk.users[order.user].payments
        messages = [Message("system", system_text(1)), *_opening(facts, order, random)]
        for _ in range(rounds):
            item = facts.desk.items[random.choice(order.items)]
            messages.append(Message("user", random.choice(TERSE_ANSWERS["item"]).format(item.name)))
            messages.append(call_message("list_variants", item_id=item.id))
            if random.random() < 0.4:
                payment = random.choice(payments)
                messages.append(
                    Message("user", random.choice(TERSE_ANSWERS["payment"]).format(payment.kind))
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
        facts = scenario(1, "session", index)
        order = random.choice(list(facts.desk.orders.values()))
        goods = random.random() < 0.85
        order = replace(order, status="delivered" if goods else "pending")
        owner = facts.desk.users[order.user]
        facts.desk.users[order.user] = replace(owner, account="personal")
        wishes = [
            random.choice(("return", "exchange")) if goods else "redirect" for _ in range(rounds)
        ]
        messages = [Message("system", system_text(1))]
        for place, wish in enumerate(wishes):
            messages.append(Message("user", random.choice(WISHES[wish])))
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
        *PAYMENTS,
        *ARGUMENTS,
        "gift",
        "sale",
        "final",
        *map(str, range(10, 100)),
    ]
    for _ in range(2 * count):
        yield "".join(f" {word}" for word in words)
        yield "business"
        yield "personal"


def _opening(facts: Scenario, order: Order, random: Random) -> list[Message]:
    answer = random.choice(TERSE_ANSWERS["order"]).format(order.id)
    return [
        Message("assistant", QUESTIONS["order"]),
        Message("user", answer),
        call_message("get_order", order_id=order.id),
        Message("tool", order_record(facts.desk, order)),
    ]


def _question(kind: str, what: str, random: Random) -> list[Message]:
    answer = random.choice(TERSE_ANSWERS[kind]).format(what)
    return [Message("assistant", QUESTIONS[kind]), Message("user", answer)]


def _round(facts: Scenario, order: Order, wish: str, random: Random) -> list[Message]:
    """Return the messages of one request, from its details to its confirmation."""
    desk = facts.desk
    payments = desk.users[order.user].payments
    if wish == "redirect":
        point = str(random.randrange(10, 100))
        call = call_message("redirect_order", order_id=order.id, point_id=point)
        return [*_question("point", point, random), call, *_closing("ok", "Done.")]
    item = desk.items[random.choice(order.items)]
    opened = _question("item", item.name, random)
    if wish == "exchange":
        variants = desk.variants(item)
        new = random.choice(variants)
        listed = [
            call_message("list_variants", item_id=item.id),
            Message("tool", variants_record(desk, item)),
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
