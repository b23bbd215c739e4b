"""The practice of the policy `base`: look-ups and sessions of the retail desk alone.

They were written before those of `tools.base_policy.practice`, which come from any `Domain`. They
stay as they are, so that the policy with which the demo was measured can be made again.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from tools.base_policy.practice import Example, Practice, texts
from unstale.envs import Message
from unstale.envs.desk.database import Desk, User
from unstale.envs.desk.domain import Scenario
from unstale.envs.desk.expert import call_message
from unstale.envs.retail import (
    COLOURS,
    FACTS,
    NAMES,
    PAYMENTS,
    RETAIL,
    WISHES,
    Item,
    Order,
    variants,
)

FAULTS = {
    "status": 0.6,
    "account": 0.6,
    "final": 0.65,
    "sale": 0.65,
    "item": 0.7,
    "payment": 0.65,
    "variant": 0.65,
    "point": 0.65,
    "cancel": 0.1,
}
"""Fault rates. Most are above one half, so that the greedy policy fails too. All are below 1, so
that reinforcement learning sees correct behaviour."""


class RetailPractice(Practice):
    """A maker of the examples of the policy `base`."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, RETAIL, FAULTS)

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
        return self.look_ups(text, random.choices(pairs, k=30))

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

    def session(self, index: int, requests: int = 3) -> Example:
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
            random.choice(("return", "exchange")) if goods else "redirect" for _ in range(requests)
        ]
        messages = [Message("system", RETAIL.prompt(1))]
        for place, wish in enumerate(wishes):
            messages.append(Message("user", random.choice(WISHES[wish].terse)))
            if place == 0:
                messages += _opening(facts, order, random)
            messages += _round(facts, order, wish, random)
        return self.conversation(messages)


def retail_corpus(count: int) -> Iterator[str]:
    """Yield the text on which the tokenizer of `base` was trained."""
    yield from texts(RETAIL, count, (1,) * 10 + (2, 3))
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
