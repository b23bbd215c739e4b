"""The environment `delivery`: the desk of a food delivery, with times, places and refunds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from unstale.envs.desk import desk_spec
from unstale.envs.desk.database import Desk, DeskError, User, numbered, with_record
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

Status = Literal["placed", "packed", "riding", "arrived", "cancelled"]

DISHES = ("soup", "pizza", "salad", "rice", "curry", "noodles", "burger", "tacos", "pie", "stew")
PLACES = ("home", "work", "gym", "school", "hotel", "club")
TIMES = ("noon", "one", "two", "three", "five", "six", "seven", "eight")
PAYMENTS = ("credit", "card", "bank", "wallet")
"""Payment methods. Every customer has a credit account and one of the others."""

POLICY = """You serve the desk of a food delivery service. Customers write to you; you look \
things up and change things with the tools.

Rules. If several apply, the first one decides.
1. {identify}
2. Look an order up before you decide anything about it. Ask the customer for what you do not \
know, and end each question with "?". Never invent a number.
3. Orders of company accounts: do nothing yourself; call hand_over for the order. Your work on it \
then ends.
4. Cancelling: only orders that are placed. Anything else: refuse, reason "status".
5. Another address, time or locker: only orders that are placed or packed. If the courier is \
riding: hand_over for another address, refuse with reason "status" for anything else. If the order \
has arrived: refuse, reason "status".
6. Addresses that are marked "far" cannot be used: refuse, reason "zone".
7. List the slots to find the number of a time. If it is taken: refuse, reason "taken".
8. Dishes that are missing or bad: only of orders that have arrived. An order that is still \
placed is cancelled instead; otherwise refuse, reason "status". Orders that arrived more than 3 \
days ago: refuse, reason "late".
9. Refunds go to the payment method the customer names, except that dishes marked "promo" are \
always refunded to the customer's credit account, whatever the customer says.

A refusal is made by calling refuse with the order and the reason, then telling the customer. When \
all is done, say so in one short sentence without a question."""

WISHES = {
    "cancel": Wish(
        ("Please cancel my order.", "I do not want my order."),
        (
            "Hi, I'm not hungry any more. Please cancel what I ordered.",
            "Hello, I ordered twice by mistake. Can you call one of them off?",
            "Something came up and nobody will be there to eat. Please stop my order.",
        ),
    ),
    "move": Wish(
        ("Please bring it elsewhere.", "I want another address."),
        (
            "Hi, I'm not where I said I would be. Can the courier come somewhere else?",
            "Hello, please send my food to another of my addresses.",
            "I chose the wrong address when I ordered. Could you correct that?",
        ),
    ),
    "time": Wish(
        ("I want another time.", "Please come at another time."),
        (
            "Hello, my meeting takes longer. Can my food come at another time?",
            "Hi there, we'd like to eat at a different hour. Is that possible?",
            "Could you change the delivery time of my order, please?",
        ),
    ),
    "locker": Wish(
        ("Please use a locker.", "I want it in a locker."),
        (
            "Hi, I can't open the door today. Could the courier use one of your lockers?",
            "Hello, I'd rather pick my food up from a locker.",
            "Please have my order left in a locker near me.",
        ),
    ),
    "refund": Wish(
        ("A dish is bad.", "A dish is missing."),
        (
            "Hello, part of what came was cold. I want my money back for it.",
            "Hi, one of the things I paid for was not in the bag.",
            "Good evening. Something we got tastes wrong. I'd like a refund.",
        ),
    ),
}

FACTS = {
    "order": Fact(
        "Which order?",
        (),
        ("Order {}.", "It is {}."),
        ("The order number is {}.", "The app shows {}.", "It's {}, I believe."),
    ),
    "dish": Fact(
        "Which dish?",
        ("dish", "dishes", "which one", "which of", "which item"),
        ("The {}.", "My {}."),
        ("It's the {}.", "I mean the {}.", "The {}. The rest was fine."),
    ),
    "payment": REFUND_TO,
    "place": Fact(
        "Which address?",
        ("address", "addresses", "where to", "where should"),
        ("To my {}.", "My {}."),
        ("Please come to my {}.", "I'm at the {} now.", "The {} one, please."),
    ),
    "time": Fact(
        "Which time?",
        ("time", "when", "which hour", "which slot"),
        ("At {}.", "Make it {}."),
        ("At {}, please.", "Could it be {}?", "We'd like to eat at {}."),
    ),
    "locker": Fact(
        "Which locker?",
        ("locker",),
        ("Locker {}.", "It is {}."),
        ("Locker {}, please.", "The one at the station: {}.", "Number {} is close to me."),
    ),
}


@dataclass(frozen=True, slots=True)
class Slot:
    """A time at which a courier can come. `taken` is True if it can no longer be chosen."""

    id: str
    time: str
    taken: bool


@dataclass(frozen=True, slots=True)
class Dish:
    id: str
    name: str
    promo: bool
    refunded_to: str = ""
    """Number of the payment method to which the dish was refunded. Empty without a refund."""


@dataclass(frozen=True, slots=True)
class Address:
    id: str
    name: str
    far: bool


@dataclass(frozen=True, slots=True)
class Order:
    id: str
    user: str
    status: Status
    dishes: tuple[Dish, ...]
    addresses: tuple[Address, ...]
    """The delivery addresses of the customer."""
    place: str
    """Number of the address or locker to which the order is delivered."""
    slot: str
    days: int
    """Number of days since the order arrived; 0 before that."""


def get_order(desk: Desk, order_id: str) -> Mapping[str, Any]:
    """Look up an order: account, status, dishes, addresses, payment methods."""
    order = desk.get(Order, order_id)
    user = desk[User][order.user]
    record: dict[str, Any] = {
        "account": user.account,
        "status": order.status,
        "dishes": [
            {"dish_id": int(each.id), "name": each.name, "promo": each.promo}
            for each in order.dishes
        ],
        "pay": user.payment_rows(),
        "addresses": [
            {"address_id": int(each.id), "name": each.name, "far": each.far}
            for each in order.addresses
        ],
    }
    days = order.days if order.status == "arrived" else None
    return record if desk.terse else {**record, "days_since_arrival": days}


def list_slots(desk: Desk, order_id: str) -> Mapping[str, Any]:
    """List the other times at which an order can come, with their numbers."""
    slots = other_slots(desk, desk.get(Order, order_id))
    rows = [{"slot_id": int(each.id), "time": each.time, "taken": each.taken} for each in slots]
    return {"slots": rows}


def other_slots(desk: Desk, order: Order) -> list[Slot]:
    return [slot for slot in desk[Slot].values() if slot.id != order.slot]


def cancel_order(desk: Desk, order_id: str) -> str:
    """Cancel a whole order."""
    order = desk.get(Order, order_id)
    if order.status == "cancelled":
        raise DeskError(f"order {order_id} is cancelled already")
    desk.put(replace(order, status="cancelled"))
    return "ok"


def change_address(desk: Desk, order_id: str, address_id: str) -> str:
    """Send an order to another address of the customer."""
    order = desk.get(Order, order_id)
    if address_id not in {address.id for address in order.addresses}:
        raise DeskError(f"no address {address_id}")
    desk.put(replace(order, place=address_id))
    return "ok"


def change_time(desk: Desk, order_id: str, slot_id: str) -> str:
    """Let an order come at another time."""
    order = desk.get(Order, order_id)
    if slot_id not in {slot.id for slot in other_slots(desk, order)}:
        raise DeskError(f"no other slot {slot_id}")
    desk.put(replace(order, slot=slot_id))
    return "ok"


def use_locker(desk: Desk, order_id: str, locker_id: str) -> str:
    """Send an order to a locker."""
    locker = numbered(locker_id, "locker")
    desk.put(replace(desk.get(Order, order_id), place=locker))
    return "ok"


def refund_dish(desk: Desk, order_id: str, dish_id: str, payment_id: str) -> str:
    """Refund one dish of an order to a payment method."""
    order = desk.get(Order, order_id)
    if dish_id not in {dish.id for dish in order.dishes if not dish.refunded_to}:
        raise DeskError(f"no dish {dish_id} in order {order_id}")
    desk[User][order.user].require_payment(payment_id)
    dishes = (
        replace(dish, refunded_to=payment_id) if dish.id == dish_id else dish
        for dish in order.dishes
    )
    desk.put(replace(order, dishes=tuple(dishes)))
    return "ok"


def add_slots(draw: Draw) -> None:
    """Add five time slots at which couriers come."""
    for time in draw.random.sample(TIMES, 5):
        taken = draw.level > 1 and draw.random.random() < 0.2
        draw.desk.put(Slot(draw.number(), time, taken))


def draw_order(draw: Draw, user: User) -> Order:
    """Return a random order of two or three dishes, of a customer with three addresses."""
    random = draw.random
    dishes = tuple(
        Dish(draw.number(), name, promo=random.random() < 0.3)
        for name in random.sample(DISHES, random.choice((2, 3)))
    )
    addresses = tuple(
        Address(draw.number(), name, far=random.random() < 0.2) for name in random.sample(PLACES, 3)
    )
    status: Status = random.choice(("placed", "packed", "riding", "arrived"))
    slot = random.choice(list(draw.desk[Slot]))
    return Order(draw.number(), user.id, status, dishes, addresses, addresses[0].id, slot, days=0)


KINDS = {
    "cancel": 0.07,
    "cancel_instead": 0.04,
    "move": 0.17,
    "time": 0.19,
    "locker": 0.09,
    "refund": 0.14,
    "refund_promo": 0.11,
    "refuse_status": 0.05,
    "refuse_rule": 0.05,
    "company": 0.06,
    "move_riding": 0.03,
}
"""Share of each kind of request. `cancel_instead` is a complaint about an order that is still
placed. In `refuse_rule` a rule forbids the wish: a far address; from level 2 on also a time that is
taken, or a complaint that comes too late.
"""

_WISHES: Mapping[str, tuple[tuple[str, tuple[Status, ...]], ...]] = {
    "cancel": (("cancel", ("placed",)),),
    "cancel_instead": (("refund", ("placed",)),),
    "move": (("move", ("placed", "packed")),),
    "time": (("time", ("placed", "packed")),),
    "locker": (("locker", ("placed", "packed")),),
    "refund": (("refund", ("arrived",)),),
    "refund_promo": (("refund", ("arrived",)),),
    "refuse_status": (
        ("cancel", ("packed", "riding", "arrived")),
        ("move", ("arrived",)),
        ("time", ("riding", "arrived")),
        ("locker", ("riding", "arrived")),
        ("refund", ("packed", "riding")),
    ),
    "company": (
        ("cancel", ("placed",)),
        ("move", ("placed", "packed")),
        ("time", ("placed", "packed")),
        ("refund", ("arrived",)),
    ),
    "move_riding": (("move", ("riding",)),),
    "zone": (("move", ("placed", "packed")),),
    "taken": (("time", ("placed", "packed")),),
    "late": (("refund", ("arrived",)),),
}
"""The possible wishes of each kind of request, and of each reason to refuse one. Each wish has the
possible states of its order.
"""


def draw_request(draw: Draw, kind: str, user: User) -> Request:
    """Return a request of the given kind. Add the order that it is about to the database."""
    random, slots = draw.random, draw.desk[Slot]
    causes = ("zone", "taken", "late") if draw.level > 1 else ("zone",)
    cause = random.choice(causes) if kind == "refuse_rule" else kind
    wish, statuses = random.choice(_WISHES[cause])
    order = replace(draw_order(draw, user), status=random.choice(statuses))
    days = 0
    if order.status == "arrived":
        days = random.randrange(4, 10) if cause == "late" else random.randrange(4)
    dish = random.choice(order.dishes)
    if wish == "refund":
        dish = replace(dish, promo=kind == "refund_promo")
    address = random.choice(order.addresses[1:])
    address = replace(address, far=cause == "zone")
    slot = random.choice(other_slots(draw.desk, order))
    slots[slot.id] = replace(slot, taken=cause == "taken")
    order = replace(
        order,
        days=days,
        dishes=with_record(order.dishes, dish),
        addresses=with_record(order.addresses, address),
    )
    shuffled = random.sample(order.addresses, len(order.addresses))
    draw.desk.put(replace(order, addresses=tuple(shuffled)))
    payment, locker = random.choice(user.payments), draw.number()
    wants = {
        "dish": dish.id,
        "payment": payment.id,
        "address": address.id,
        "slot": slot.id,
        "locker": locker,
    }
    known = {
        "cancel": {},
        "move": {"place": address.name},
        "time": {"time": slot.time},
        "locker": {"locker": locker},
        "refund": {"dish": dish.name, "payment": payment.kind},
    }[wish]
    return Request(kind, wish, order.id, wants, known)


def decide(scenario: Scenario, request: Request, ignores: Ignores) -> list[Step]:
    """Return the steps that a scripted expert takes to serve a request.

    `ignores` returns True for rules that the expert ignores. If it ignores `dish`, `payment`,
    `address` or `slot`, the expert takes the first of a list instead of the one that the customer
    means. If it ignores `locker`, it takes the present place, and if it ignores `cancel`, it
    refuses to cancel. If it ignores `zone`, `promo` or `status`, it does not look at the address,
    the dish or the state of the order.
    """
    desk, wish, wants = scenario.desk, request.wish, request.wants
    order = desk[Order][request.case]
    right = {"cancel": ("placed",), "refund": ("arrived",)}.get(wish, ("placed", "packed"))
    if order.status not in right and not ignores("status"):
        if wish == "move" and order.status == "riding":
            return [("hand_over", {})]
        if wish == "refund" and order.status == "placed":
            return [("cancel_order", {})]
        return [refuse("status")]
    if wish == "cancel":
        return [refuse("status") if ignores("cancel") else ("cancel_order", {})]
    if wish == "locker":
        locker = order.place if ignores("locker") else wants["locker"]
        return ["locker", ("use_locker", {"locker_id": locker})]
    if wish == "move":
        chosen = order.addresses[0].id if ignores("address") else wants["address"]
        is_far = {address.id: address.far for address in order.addresses}[chosen]
        if is_far and not ignores("zone"):
            return ["place", refuse("zone")]
        return ["place", ("change_address", {"address_id": chosen})]
    if wish == "time":
        slot = other_slots(desk, order)[0].id if ignores("slot") else wants["slot"]
        call = ("change_time", {"slot_id": slot})
        return [("list_slots", {}), "time", refuse("taken") if desk[Slot][slot].taken else call]
    return _refund(scenario, request, order, ignores)


def _refund(scenario: Scenario, request: Request, order: Order, ignores: Ignores) -> list[Step]:
    if order.days > 3:
        return [refuse("late")]
    dish = order.dishes[0].id if ignores("dish") else request.wants["dish"]
    is_promo = {each.id: each.promo for each in order.dishes}[dish]
    if is_promo and not ignores("promo"):
        credit = scenario.user.payment_of("credit")
        return ["dish", ("refund_dish", {"dish_id": dish, "payment_id": credit})]
    first_payment = scenario.user.payments[0].id
    payment = first_payment if ignores("payment") else request.wants["payment"]
    return ["dish", "payment", ("refund_dish", {"dish_id": dish, "payment_id": payment})]


DELIVERY = Domain(
    name="delivery",
    case=Order,
    tools=Toolbox(
        Order,
        reads=(get_order, list_slots),
        writes=(cancel_order, change_address, change_time, use_locker, refund_dish),
        reasons=("status", "zone", "taken", "late"),
        meanings={
            "address_id": "Number of the new address.",
            "slot_id": "Number of the new time.",
            "locker_id": "Number of the locker.",
            "dish_id": "Number of the dish.",
            "payment_id": "Number of the payment method that gets the refund.",
        },
    ),
    kinds=KINDS,
    handed_over=("move_riding",),
    wishes=WISHES,
    facts=FACTS,
    brief="Keep the rules of the couriers.",
    policy=POLICY,
    add_stock=add_slots,
    draw_case=draw_order,
    draw_request=draw_request,
    decide=decide,
    faults=(
        "status",
        "zone",
        "promo",
        "dish",
        "payment",
        "address",
        "slot",
        "locker",
        "cancel",
    ),
    accounts=("personal", "company"),
    payments=PAYMENTS,
)

ENV = desk_spec(DELIVERY)
