"""The facts of an episode: the shop, the customer's requests, and the correct calls."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from unstale.envs.retail.database import Desk, Item, Order, Payment, Status, Terms, User
from unstale.envs.retail.tools import call_tool
from unstale.envs.retail.wording import COLOURS, NAMES, PAYMENTS, PEOPLE

Wish = Literal["cancel", "return", "exchange", "redirect"]
Call = tuple[str, Mapping[str, Any]]

KINDS: Mapping[str, float] = {
    "cancel": 0.08,
    "cancel_instead": 0.04,
    "return": 0.21,
    "return_sale": 0.14,
    "exchange": 0.24,
    "redirect": 0.10,
    "refuse_status": 0.05,
    "refuse_final": 0.05,
    "business": 0.06,
    "redirect_shipped": 0.03,
}
"""Shares of the kinds of requests. Refusing is right in 10%, handing over in 9%, cancelling in 12%.

From level 2 on, `refuse_final` includes refusals for stock and window.
"""


@dataclass(frozen=True, slots=True)
class CustomerRequest:
    """A request of the customer, with the facts for the customer's answers."""

    kind: str
    wish: Wish
    order: str
    item: str = ""
    payment: str = ""
    """Number of the payment method that the customer names."""
    new_item: str = ""
    point: str = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The facts of an episode. `desk` is the shop at its start, to be copied before changes."""

    level: int
    desk: Desk
    user: User
    requests: tuple[CustomerRequest, ...]
    seed: int

    def known_facts(self, request: CustomerRequest) -> dict[str, str]:
        """Return the customer's answers by kind: names of items and payments, numbers of others."""
        facts = {"email": self.user.email} if self.level > 2 else {}
        facts["order"] = request.order
        if request.item:
            facts["item"] = self.desk.items[request.item].name
        if request.payment:
            facts["payment"] = next(p.kind for p in self.user.payments if p.id == request.payment)
        if request.new_item:
            facts["colour"] = self.desk.items[request.new_item].colour
        if request.point:
            facts["point"] = request.point
        return facts

    def goal(self) -> dict[str, Order]:
        """Return the orders after the correct calls."""
        desk = self.desk.copy()
        for request in self.requests:
            name, arguments = correct_call(self, request)
            call_tool(desk, name, arguments)
        return desk.state()


def correct_call(scenario: Scenario, request: CustomerRequest) -> Call:
    """Return the call that the rules require."""
    order = scenario.desk.orders[request.order]
    number = {"order_id": order.id}
    if scenario.user.account == "business":
        return "hand_over", number
    if request.wish == "cancel":
        return ("cancel_order", number) if order.status == "pending" else _refusal(order, "status")
    if request.wish == "redirect":
        if order.status == "pending":
            return "redirect_order", {**number, "point_id": request.point}
        return ("hand_over", number) if order.status == "shipped" else _refusal(order, "status")
    return _about_item(scenario, request, order)


def _about_item(scenario: Scenario, request: CustomerRequest, order: Order) -> Call:
    item = scenario.desk.items[request.item]
    number = {"order_id": order.id}
    if request.wish == "return" and order.status == "pending":
        return "cancel_order", number
    if order.status != "delivered":
        return _refusal(order, "status")
    if scenario.level > 1 and order.days > 30:
        return _refusal(order, "window")
    if request.wish == "exchange":
        if not scenario.desk.items[request.new_item].in_stock:
            return _refusal(order, "stock")
        return "exchange_item", {**number, "item_id": item.id, "new_item_id": request.new_item}
    if item.terms == "final":
        return _refusal(order, "final")
    gift = next(p.id for p in scenario.user.payments if p.kind == "gift")
    payment = gift if item.terms == "sale" else request.payment
    return "return_item", {**number, "item_id": item.id, "payment_id": payment}


def _refusal(order: Order, reason: str) -> Call:
    return "refuse", {"order_id": order.id, "reason": reason}


class _Numbers:
    """A generator of unused numbers, with two digits at level 1 and four above."""

    def __init__(self, random: Random, level: int) -> None:
        self.random = random
        self.used: set[str] = set()
        self.range = (10, 100) if level == 1 else (1000, 10000)

    def __call__(self) -> str:
        while True:
            number = str(self.random.randrange(*self.range))
            if number not in self.used:
                self.used.add(number)
                return number


def scenario(level: int, split: str, index: int) -> Scenario:
    """Return the scenario of a task, determined by the arguments."""
    random = Random(f"retail/{level}/{split}/{index}")
    kinds = random.choices(
        list(KINDS), weights=list(KINDS.values()), k=2 if level > 2 and random.random() < 0.4 else 1
    )
    if "business" in kinds:
        kinds = ["business"]
    # A hand-over ends the episode, so it comes last.
    kinds.sort(key=lambda kind: kind == "redirect_shipped")
    numbers = _Numbers(random, level)
    users = {user.id: user for user in _users(random, numbers, kinds)}
    items = {item.id: item for item in _stock(random, numbers, level)}
    desk = Desk(users, items, {}, terse=level == 1)
    customer = next(iter(users.values()))
    requests = tuple(_request(kind, desk, customer, (random, numbers, level)) for kind in kinds)
    for user in users.values():
        order = _order(desk, user, random, numbers)
        desk.orders[order.id] = order
    shuffled = list(desk.orders.items())
    random.shuffle(shuffled)
    desk.orders = dict(shuffled)
    return Scenario(level, desk, customer, requests, random.getrandbits(32))


def _users(random: Random, numbers: _Numbers, kinds: list[str]) -> list[User]:
    people = random.sample(PEOPLE, 3)
    users = []
    for place, name in enumerate(people):
        kinds_paid = ["gift", random.choice(PAYMENTS)]
        random.shuffle(kinds_paid)
        payments = tuple(Payment(numbers(), kind) for kind in kinds_paid)
        business = kinds == ["business"] if place == 0 else random.random() < 0.2
        email = name.lower().replace(" ", ".") + "@example.com"
        users.append(User(numbers(), name, email, "business" if business else "personal", payments))
    return users


def _stock(random: Random, numbers: _Numbers, level: int) -> list[Item]:
    items = []
    for name in random.sample(NAMES, 6):
        terms: Terms = random.choices(("regular", "sale", "final"), weights=(0.6, 0.2, 0.2))[0]
        for colour in random.sample(COLOURS, 4):
            items.append(Item(numbers(), name, colour, terms, level == 1 or random.random() < 0.8))
    return items


def _order(desk: Desk, user: User, random: Random, numbers: _Numbers) -> Order:
    """Return a random order of two or three products."""
    products = random.sample(
        sorted({item.name for item in desk.items.values()}), random.choice((2, 3))
    )
    items = tuple(
        random.choice([i.id for i in desk.items.values() if i.name == name]) for name in products
    )
    status: Status = random.choice(("pending", "shipped", "delivered"))
    days = random.randrange(1, 30) if status == "delivered" else 0
    return Order(numbers(), user.id, status, items, user.payments[0].id, numbers(), days)


def _request(
    kind: str, desk: Desk, user: User, source: tuple[Random, _Numbers, int]
) -> CustomerRequest:
    """Return a request of a kind, and add an order that fits it to the database."""
    random, numbers, level = source
    wish, statuses = _wish_and_states(kind, random, level)
    order = replace(_order(desk, user, random, numbers), status=random.choice(statuses))
    item_id = random.choice(order.items)
    days = random.randrange(1, 30) if order.status == "delivered" else 0
    others = [item.id for item in desk.variants(desk.items[item_id])]
    new_item = random.choice(others)
    terms: Terms | None = _TERMS.get(kind)
    cause = (
        random.choice(("final", "stock", "window"))
        if kind == "refuse_final" and level > 1
        else terms
    )
    if cause == "window":
        days = random.randrange(31, 90)
    if cause == "stock":
        wish = "exchange"
    if kind in ("exchange", "refuse_final"):
        desk.items[new_item] = replace(desk.items[new_item], in_stock=cause != "stock")
    if wish == "return" and terms:
        _set_terms(desk, desk.items[item_id].name, terms if cause != "window" else "regular")
    desk.orders[order.id] = replace(order, days=days)
    to_gift = random.random() < 0.5 and terms != "sale"
    payment = next(payment.id for payment in user.payments if (payment.kind == "gift") == to_gift)
    point = numbers()
    if wish == "return":
        return CustomerRequest(kind, wish, order.id, item=item_id, payment=payment)
    if wish == "exchange":
        return CustomerRequest(kind, wish, order.id, item=item_id, new_item=new_item)
    return CustomerRequest(kind, wish, order.id, point=point if wish == "redirect" else "")


def _wish_and_states(kind: str, random: Random, level: int) -> tuple[Wish, tuple[Status, ...]]:
    """Return the wish of a request, and the possible states of its order."""
    if kind == "cancel":
        return "cancel", ("pending",)
    if kind == "cancel_instead":
        return "return", ("pending",)
    if kind in ("return", "return_sale", "refuse_final"):
        return "return", ("delivered",)
    if kind == "exchange":
        return "exchange", ("delivered",)
    if kind == "redirect":
        return "redirect", ("pending",)
    if kind == "redirect_shipped":
        return "redirect", ("shipped",)
    if kind == "business":
        wish: Wish = random.choice(("cancel", "return", "exchange", "redirect"))
        return wish, ("delivered",) if wish in ("return", "exchange") else ("pending",)
    if level == 1:
        return random.choice((("cancel", ("shipped", "delivered")), ("return", ("shipped",))))
    return random.choice(
        (
            ("cancel", ("shipped", "delivered")),
            ("return", ("shipped",)),
            ("exchange", ("pending", "shipped")),
            ("redirect", ("delivered",)),
        )
    )


_TERMS: Mapping[str, Terms] = {"return": "regular", "return_sale": "sale", "refuse_final": "final"}


def _set_terms(desk: Desk, name: str, terms: Terms) -> None:
    for item in list(desk.items.values()):
        if item.name == name:
            desk.items[item.id] = replace(item, terms=terms)
