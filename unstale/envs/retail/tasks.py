"""The facts of an episode at the desk, drawn by seed: the shop, a customer and the requests."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from unstale.envs.retail.database import Desk, Item, Order, Payment, Status, Terms, User
from unstale.envs.retail.wording import COLOURS, NAMES, PAYMENTS, PEOPLE

Wish = Literal["cancel", "return", "exchange", "redirect"]

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
"""Share of each kind of request. The right decision is to refuse in 10%, to hand over in 9%, to
cancel in 12%. From level 2 on, `refuse_final` includes refusals for stock and for the return
window.
"""

_WISHES: Mapping[str, tuple[tuple[Wish, tuple[Status, ...]], ...]] = {
    "cancel": (("cancel", ("pending",)),),
    "cancel_instead": (("return", ("pending",)),),
    "return": (("return", ("delivered",)),),
    "return_sale": (("return", ("delivered",)),),
    "exchange": (("exchange", ("delivered",)),),
    "redirect": (("redirect", ("pending",)),),
    "refuse_status": (
        ("cancel", ("shipped", "delivered")),
        ("return", ("shipped",)),
        ("exchange", ("pending", "shipped")),
        ("redirect", ("delivered",)),
    ),
    "refuse_final": (("return", ("delivered",)),),
    "business": (
        ("cancel", ("pending",)),
        ("return", ("delivered",)),
        ("exchange", ("delivered",)),
        ("redirect", ("pending",)),
    ),
    "redirect_shipped": (("redirect", ("shipped",)),),
}
"""The possible wishes of each kind of request, each with the possible states of its order."""

_TERMS: Mapping[str, Terms] = {"return": "regular", "return_sale": "sale", "refuse_final": "final"}


@dataclass(frozen=True, slots=True)
class CustomerRequest:
    """A request of the customer, with the facts that the customer knows."""

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
    """The facts of one episode.

    `desk` is the shop's database at the start, to be copied before use.
    """

    level: int
    desk: Desk
    user: User
    requests: tuple[CustomerRequest, ...]
    seed: int

    def known_facts(self, request: CustomerRequest) -> dict[str, str]:
        """Return what the customer can answer, by kind of question.

        Items and payment methods are given by name, everything else by number.
        """
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


def scenario(level: int, split: str, index: int) -> Scenario:
    """Return the scenario of a task. It depends only on the arguments."""
    return _Draw(Random(f"retail/{level}/{split}/{index}"), level).scenario()


class _Draw:
    """Draws one scenario at random."""

    def __init__(self, random: Random, level: int) -> None:
        self.random = random
        self.level = level
        self.used: set[str] = set()
        """Numbers used in this scenario, all different. They have two digits at level 1, four at
        higher levels.
        """
        self.desk = Desk({}, {}, {}, terse=level == 1)

    def scenario(self) -> Scenario:
        random, desk = self.random, self.desk
        num_requests = 2 if self.level > 2 and random.random() < 0.4 else 1
        kinds = random.choices(list(KINDS), weights=list(KINDS.values()), k=num_requests)
        if "business" in kinds:
            kinds = ["business"]
        # A hand-over ends the episode, so it comes last.
        kinds.sort(key=lambda kind: kind == "redirect_shipped")
        self.add_users(kinds)
        self.add_stock()
        customer = next(iter(desk.users.values()))
        requests = tuple(self.request(kind, customer) for kind in kinds)
        for user in desk.users.values():
            order = self.order(user)
            desk.orders[order.id] = order
        shuffled = list(desk.orders.items())
        random.shuffle(shuffled)
        desk.orders = dict(shuffled)
        return Scenario(self.level, desk, customer, requests, random.getrandbits(32))

    def number(self) -> str:
        """Return a number that the scenario does not use yet."""
        while True:
            number = str(self.random.randrange(*((10, 100) if self.level == 1 else (1000, 10000))))
            if number not in self.used:
                self.used.add(number)
                return number

    def add_users(self, kinds: list[str]) -> None:
        """Add three users. The first is the customer."""
        for place, name in enumerate(self.random.sample(PEOPLE, 3)):
            payment_kinds = ["gift", self.random.choice(PAYMENTS)]
            self.random.shuffle(payment_kinds)
            payments = tuple(Payment(self.number(), kind) for kind in payment_kinds)
            business = kinds == ["business"] if place == 0 else self.random.random() < 0.2
            email = name.lower().replace(" ", ".") + "@example.com"
            account: Literal["personal", "business"] = "business" if business else "personal"
            user = User(self.number(), name, email, account, payments)
            self.desk.users[user.id] = user

    def add_stock(self) -> None:
        """Add six products in four colours each."""
        for name in self.random.sample(NAMES, 6):
            kinds: tuple[Terms, ...] = ("regular", "sale", "final")
            (terms,) = self.random.choices(kinds, weights=(0.6, 0.2, 0.2))
            for colour in self.random.sample(COLOURS, 4):
                number = self.number()
                in_stock = self.level == 1 or self.random.random() < 0.8
                self.desk.items[number] = Item(number, name, colour, terms, in_stock)

    def order(self, user: User) -> Order:
        """Return a random order of two or three products."""
        random, items = self.random, self.desk.items.values()
        products = random.sample(sorted({item.name for item in items}), random.choice((2, 3)))
        chosen = tuple(
            random.choice([item.id for item in items if item.name == name]) for name in products
        )
        status: Status = random.choice(("pending", "shipped", "delivered"))
        days = random.randrange(1, 30) if status == "delivered" else 0
        paid_with = user.payments[0].id
        return Order(self.number(), user.id, status, chosen, paid_with, self.number(), days)

    def request(self, kind: str, user: User) -> CustomerRequest:
        """Return a request of the given kind. Add an order that fits it to the database."""
        random, items = self.random, self.desk.items
        wishes = _WISHES[kind]
        if kind == "refuse_status" and self.level == 1:
            wishes = wishes[:2]
        wish, statuses = wishes[0] if len(wishes) == 1 else random.choice(wishes)
        order = replace(self.order(user), status=random.choice(statuses))
        item = items[random.choice(order.items)]
        days = random.randrange(1, 30) if order.status == "delivered" else 0
        new_item = random.choice(self.desk.variants(item))
        terms = _TERMS.get(kind)
        cause: str | None = terms
        if kind == "refuse_final" and self.level > 1:
            cause = random.choice(("final", "stock", "window"))
        if cause == "window":
            days = random.randrange(31, 90)
        if cause == "stock":
            wish = "exchange"
        if kind in ("exchange", "refuse_final"):
            items[new_item.id] = replace(new_item, in_stock=cause != "stock")
        if wish == "return" and terms:
            terms = "regular" if cause == "window" else terms
            for other in [item, *self.desk.variants(item)]:
                items[other.id] = replace(other, terms=terms)
        self.desk.orders[order.id] = replace(order, days=days)
        to_gift = random.random() < 0.5 and kind != "return_sale"
        payment = next(p.id for p in user.payments if (p.kind == "gift") == to_gift)
        point = self.number()
        if wish == "return":
            return CustomerRequest(kind, wish, order.id, item=item.id, payment=payment)
        if wish == "exchange":
            return CustomerRequest(kind, wish, order.id, item=item.id, new_item=new_item.id)
        return CustomerRequest(kind, wish, order.id, point=point if wish == "redirect" else "")
