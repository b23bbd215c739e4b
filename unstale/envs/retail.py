"""The environment `retail`: the help desk of a shop, with returns, exchanges and redirections."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from unstale.envs.desk import DeskTasks, desk_spec
from unstale.envs.desk.database import Desk, DeskError, User, numbered
from unstale.envs.desk.domain import (
    REFUND_TO,
    Domain,
    Fact,
    Ignores,
    Request,
    Scenario,
    Step,
    Wish,
    refuse,
)
from unstale.envs.desk.draw import Draw
from unstale.envs.desk.tools import Toolbox

Status = Literal["pending", "shipped", "delivered", "cancelled"]
Terms = Literal["regular", "sale", "final"]

NAMES = (
    "mug", "lamp", "kettle", "scarf", "jacket", "tent", "chair", "clock", "radio", "pillow",
    "basket", "mirror", "bottle", "helmet", "carpet", "blanket", "vase", "drill", "fan", "desk",
    "bag", "hat", "belt", "camera",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "black", "white", "grey", "yellow", "brown")
PAYMENTS = ("gift", "card", "bank", "wallet")
"""Kinds of payment methods. Each customer has a gift balance and one of the others."""

POLICY = """You serve the help desk of a shop. Customers write to you; you look things up and \
change things with the tools.

Rules:
1. {identify}
2. Look an order up before you decide anything about it. Ask the customer for what you do not \
know; never invent a number.
3. Orders of business accounts: do nothing yourself; call hand_over for the order. Your work on it \
then ends.
4. Cancelling: only orders that are pending. Anything else: refuse, reason "status".
5. Returning: only delivered orders. If the order is still pending, cancel it instead of returning \
anything. If it is shipped: refuse, reason "status".
6. Items marked "final" cannot be returned: refuse, reason "final". They can be exchanged.
7. Refunds go to the payment method the customer names, except that items marked "sale" are always \
refunded to the customer's gift balance, whatever the customer says.
8. Exchanging: only delivered orders, otherwise refuse, reason "status"; only for another colour \
of the same product. List the variants to find the new item's number. If the wanted one is out of \
stock: refuse, reason "stock".
9. Redirecting to another pickup point: only pending orders. If the order is shipped: hand_over. \
If it is delivered: refuse, reason "status".
10. Items delivered more than 30 days ago can be neither returned nor exchanged: refuse, reason \
"window".

A refusal is made by calling refuse with the order and the reason, then telling the customer. When \
all is done, say so in one short sentence without a question."""

WISHES = {
    "cancel": Wish(
        ("Please cancel my order.", "I want to cancel an order."),
        (
            "Hi, I changed my mind about something I ordered and would like the whole order "
            "cancelled.",
            "Hello! Could you call off an order of mine? I found it cheaper elsewhere.",
            "I don't need what I ordered any more. Please cancel it.",
        ),
    ),
    "return": Wish(
        ("I want to return an item.", "Please take an item back."),
        (
            "Hello, something I bought from you isn't what I expected. I'd like to give it back "
            "and get my money.",
            "Hi there. I have one thing here I want to return, please.",
            "Good morning, I need a refund for one of the things I ordered.",
        ),
    ),
    "exchange": Wish(
        ("I want to exchange an item.", "Please swap an item."),
        (
            "Hi, I like what I got but not its colour. Can I swap it?",
            "Hello, I'd like to exchange something for the same thing in another colour.",
            "One of the things I ordered would look better in a different colour. Could we change "
            "that?",
        ),
    ),
    "redirect": Wish(
        ("Please send my order elsewhere.", "I want to redirect my order."),
        (
            "Hi! I'm travelling and can't get to my usual pickup point. Can the parcel go to "
            "another one?",
            "Could you please have my order sent to a different pickup point?",
            "I moved. My order should go to another pickup point than the one on file.",
        ),
    ),
}

FACTS = {
    "order": Fact(
        "Which order?",
        (
            "which order",
            "order number",
            "number of the order",
            "order id",
            "number of your order",
        ),
        ("Order {}.", "It is {}."),
        ("The order number is {}.", "Let me look... it says {}.", "That's {} on the receipt."),
    ),
    "item": Fact(
        "Which item?",
        ("which item", "what item", "which product", "which one", "which of"),
        ("The {}.", "My {}."),
        ("It's the {}.", "I mean the {}.", "The {}, please. The rest is fine."),
    ),
    "payment": REFUND_TO,
    "colour": Fact(
        "Which colour?",
        ("colour", "color", "variant"),
        ("In {}.", "Make it {}."),
        ("I'd like it in {}.", "Do you have it in {}?", "{}, please."),
    ),
    "point": Fact(
        "Where to?",
        ("where to", "point", "where should", "address"),
        ("To {}.", "Point {}."),
        ("Pickup point {}, please.", "The one close to my work: {}.", "Could it go to {}?"),
    ),
}


@dataclass(frozen=True, slots=True)
class Item:
    """A product in one colour."""

    id: str
    name: str
    colour: str
    terms: Terms
    in_stock: bool


@dataclass(frozen=True, slots=True)
class Order:
    id: str
    user: str
    status: Status
    items: tuple[str, ...]
    paid_with: str
    point: str
    """Number of the pickup point."""
    days: int
    """Days since the delivery. 0 for an order that is not delivered."""
    returned: tuple[tuple[str, str], ...] = ()
    """Pairs (number of a returned item, number of the payment method that got the refund)."""
    exchanged: tuple[tuple[str, str], ...] = ()
    """Pairs (number of the old item, number of the new item)."""


def item_of(desk: Desk, order: Order, item_id: str) -> Item:
    """Return an item of an order. Raises `DeskError` if the order does not have it, or no
    longer.
    """
    gone = {item for item, _ in order.returned + order.exchanged}
    if item_id not in order.items or item_id in gone:
        raise DeskError(f"no item {item_id} in order #{order.id}")
    return desk[Item][item_id]


def variants(desk: Desk, item: Item) -> list[Item]:
    """Return the items of the same product in other colours."""
    return [
        other for other in desk[Item].values() if other.name == item.name and other.id != item.id
    ]


def get_order(desk: Desk, order_id: str) -> str | Mapping[str, Any]:
    """Look up an order: account, status, items, payment methods, pickup point."""
    order = desk.get(Order, order_id)
    user = desk[User][order.user]
    items = [desk[Item][item] for item in order.items]
    if desk.terse:
        goods = ", ".join(
            f"{'' if item.terms == 'regular' else item.terms + ' '}{item.name} {item.id}"
            for item in items
        )
        payments = ", ".join(f"{payment.kind} {payment.id}" for payment in user.payments)
        return (
            f"{user.account}, {order.status}; items: {goods}; pay: {payments}; point {order.point}"
        )
    return {
        "order_id": int(order.id),
        "account": user.account,
        "status": order.status,
        "days_since_delivery": order.days if order.status == "delivered" else None,
        "items": [
            {"item_id": int(i.id), "name": i.name, "colour": i.colour, "terms": i.terms}
            for i in items
        ],
        "payment_methods": user.payment_rows(),
        "paid_with": int(order.paid_with),
        "point_id": int(order.point),
    }


def list_variants(desk: Desk, item_id: str) -> str | Mapping[str, Any]:
    """List the other variants of an item's product, with their numbers."""
    item = desk.get(Item, item_id)
    others = variants(desk, item)
    if desk.terse:
        return "colours: " + ", ".join(f"{other.colour} {other.id}" for other in others)
    rows = [
        {"item_id": int(other.id), "colour": other.colour, "in_stock": other.in_stock}
        for other in others
    ]
    return {"product": item.name, "variants": rows}


def cancel_order(desk: Desk, order_id: str) -> str:
    """Cancel a whole order."""
    order = desk.get(Order, order_id)
    if order.status == "cancelled":
        raise DeskError(f"order {order_id} is cancelled already")
    desk.put(replace(order, status="cancelled"))
    return "ok"


def return_item(desk: Desk, order_id: str, item_id: str, payment_id: str) -> str:
    """Take one item of an order back and refund it to a payment method."""
    order = desk.get(Order, order_id)
    item = item_of(desk, order, item_id)
    desk[User][order.user].require_payment(payment_id)
    desk.put(replace(order, returned=(*order.returned, (item.id, payment_id))))
    return "ok"


def exchange_item(desk: Desk, order_id: str, item_id: str, new_item_id: str) -> str:
    """Exchange one item of an order for another variant of the same product."""
    order = desk.get(Order, order_id)
    item = item_of(desk, order, item_id)
    if new_item_id not in {other.id for other in variants(desk, item)}:
        raise DeskError(f"{new_item_id} is no variant of {item_id}")
    desk.put(replace(order, exchanged=(*order.exchanged, (item.id, new_item_id))))
    return "ok"


def redirect_order(desk: Desk, order_id: str, point_id: str) -> str:
    """Send an order to another pickup point."""
    point = numbered(point_id, "pickup point")
    desk.put(replace(desk.get(Order, order_id), point=point))
    return "ok"


def add_stock(draw: Draw) -> None:
    """Add six random products, in four colours each, to the database."""
    for name in draw.random.sample(NAMES, 6):
        kinds: tuple[Terms, ...] = ("regular", "sale", "final")
        (terms,) = draw.random.choices(kinds, weights=(0.6, 0.2, 0.2))
        for colour in draw.random.sample(COLOURS, 4):
            number = draw.number()
            in_stock = draw.level == 1 or draw.random.random() < 0.8
            draw.desk.put(Item(number, name, colour, terms, in_stock))


def draw_order(draw: Draw, user: User) -> Order:
    """Return a random order of two or three products."""
    random, items = draw.random, draw.desk[Item].values()
    products = random.sample(sorted({item.name for item in items}), random.choice((2, 3)))
    chosen = tuple(
        random.choice([item.id for item in items if item.name == name]) for name in products
    )
    status: Status = random.choice(("pending", "shipped", "delivered"))
    days = random.randrange(1, 30) if status == "delivered" else 0
    paid_with = user.payments[0].id
    return Order(draw.number(), user.id, status, chosen, paid_with, draw.number(), days)


KINDS = {
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
"""Kind of a request -> its share. It is right to refuse 10% of requests, to hand over 9%, and to
cancel 12%. From level 2 on, `refuse_final` also has refusals for stock and for the return window.
"""

_WISHES: Mapping[str, tuple[tuple[str, tuple[Status, ...]], ...]] = {
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
"""Requests of customers, by kind. Each has pairs (the customer's wish, possible states of the
order), from which one pair and one of its states are drawn.
"""

_TERMS: Mapping[str, Terms] = {"return": "regular", "return_sale": "sale", "refuse_final": "final"}


def draw_request(draw: Draw, kind: str, user: User) -> Request:
    """Return a random request of this kind. Add the order that it is about to the database."""
    random, items = draw.random, draw.desk[Item]
    wishes = _WISHES[kind]
    if kind == "refuse_status" and draw.level == 1:
        wishes = wishes[:2]
    wish, statuses = wishes[0] if len(wishes) == 1 else random.choice(wishes)
    order = replace(draw_order(draw, user), status=random.choice(statuses))
    item = items[random.choice(order.items)]
    days = random.randrange(1, 30) if order.status == "delivered" else 0
    new_item = random.choice(variants(draw.desk, item))
    terms = _TERMS.get(kind)
    cause: str | None = terms
    if kind == "refuse_final" and draw.level > 1:
        cause = random.choice(("final", "stock", "window"))
    if cause == "window":
        days = random.randrange(31, 90)
    if cause == "stock":
        wish = "exchange"
    if kind in ("exchange", "refuse_final"):
        items[new_item.id] = replace(new_item, in_stock=cause != "stock")
    if wish == "return" and terms:
        terms = "regular" if cause == "window" else terms
        for other in [item, *variants(draw.desk, item)]:
            items[other.id] = replace(other, terms=terms)
    draw.desk.put(replace(order, days=days))
    to_gift = random.random() < 0.5 and kind != "return_sale"
    payment = next(p for p in user.payments if (p.kind == "gift") == to_gift)
    point = draw.number()
    wants, known = {
        "cancel": ({}, {}),
        "return": (
            {"item": item.id, "payment": payment.id},
            {"item": item.name, "payment": payment.kind},
        ),
        "exchange": (
            {"item": item.id, "new_item": new_item.id},
            {"item": item.name, "colour": new_item.colour},
        ),
        "redirect": ({"point": point}, {"point": point}),
    }[wish]
    return Request(kind, wish, order.id, wants, known)


def decide(scenario: Scenario, request: Request, ignores: Ignores) -> list[Step]:
    """Return the expert's steps. `ignores` returns True for rules that the expert breaks.

    An expert that breaks `item`, `variant` or `payment` takes the first of several instead of the
    one that is meant. With `point` it takes the old pickup point, and with `cancel` it refuses to
    cancel. With another rule it overlooks a mark or a state.
    """
    order = scenario.desk[Order][request.case]
    wish = request.wish
    required = "pending" if wish in ("cancel", "redirect") else "delivered"
    if order.status != required and not ignores("status"):
        if wish == "redirect" and order.status == "shipped":
            return [("hand_over", {})]
        if wish == "return" and order.status == "pending":
            return [("cancel_order", {})]
        return [refuse("status")]
    if wish == "redirect":
        point = order.point if ignores("point") else request.wants["point"]
        return ["point", ("redirect_order", {"point_id": point})]
    if wish == "cancel":
        return [refuse("status") if ignores("cancel") else ("cancel_order", {})]
    if scenario.level > 1 and order.days > 30:
        return [refuse("window")]
    item = order.items[0] if ignores("item") else request.wants["item"]
    about_item = _exchange if wish == "exchange" else _return
    return ["item", *about_item(scenario, request, item, ignores)]


def _return(scenario: Scenario, request: Request, item: str, ignores: Ignores) -> list[Step]:
    terms = scenario.desk[Item][item].terms
    if terms == "final" and not ignores("final"):
        return [refuse("final")]
    questions: list[Step] = []
    if terms == "sale" and not ignores("sale"):
        payment = scenario.user.payment_of("gift")
    else:
        questions = ["payment"]
        first_payment = scenario.user.payments[0].id
        payment = first_payment if ignores("payment") else request.wants["payment"]
    return [*questions, ("return_item", {"item_id": item, "payment_id": payment})]


def _exchange(scenario: Scenario, request: Request, item: str, ignores: Ignores) -> list[Step]:
    items = scenario.desk[Item]
    others = variants(scenario.desk, items[item])
    colour = items[request.wants["new_item"]].colour
    wanted = [other for other in others if other.colour == colour]
    chosen = others[0] if not wanted or ignores("variant") else wanted[0]
    call = ("exchange_item", {"item_id": item, "new_item_id": chosen.id})
    return [
        ("list_variants", {"item_id": item}),
        "colour",
        call if chosen.in_stock else refuse("stock"),
    ]


RETAIL = Domain(
    name="retail",
    case=Order,
    tools=Toolbox(
        Order,
        reads=(get_order, list_variants),
        writes=(cancel_order, return_item, exchange_item, redirect_order),
        reasons=("status", "final", "window", "stock"),
        meanings={
            "item_id": "Number of the item.",
            "payment_id": "Number of the payment method that gets the refund.",
            "new_item_id": "Number of the variant the customer gets instead.",
            "point_id": "Number of the pickup point.",
        },
    ),
    kinds=KINDS,
    handed_over=("redirect_shipped",),
    wishes=WISHES,
    facts=FACTS,
    brief="Keep the rules of the desk.",
    policy=POLICY,
    add_stock=add_stock,
    draw_case=draw_order,
    draw_request=draw_request,
    decide=decide,
    faults=("status", "final", "sale", "item", "payment", "variant", "point", "cancel"),
    payments=PAYMENTS,
    earlier_replies=True,
)

RetailTasks = partial(DeskTasks, RETAIL)
"""Creates the task set. The keyword arguments are those of `DeskTasks`."""
ENV = desk_spec(RETAIL)
