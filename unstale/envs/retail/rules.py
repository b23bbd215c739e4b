"""The decision that the shop's rules require, and a scripted expert that may ignore rules."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from unstale.envs import Message, ToolCall
from unstale.envs.retail.database import Order
from unstale.envs.retail.tasks import CustomerRequest, Scenario
from unstale.envs.retail.tools import call_tool
from unstale.envs.retail.wording import QUESTIONS

Call = tuple[str, dict[str, str]]
"""A tool call: its name and its arguments."""
Step = str | Call
"""One step of the expert: a tool call, or the kind of fact for which it asks the customer."""
Ignores = Callable[[str], bool]
"""A function of a rule's name. It returns True if the expert ignores that rule now."""


@dataclass(frozen=True, slots=True)
class Faults:
    """The probabilities with which the expert ignores each rule, independent of each other."""

    status: float = 0.0
    """Probability that the expert ignores the status of the order."""
    account: float = 0.0
    """Probability that the expert ignores the kind of the customer's account."""
    final: float = 0.0
    """Probability that the expert takes back items whose sale is final."""
    sale: float = 0.0
    """Probability that the expert refunds sale items to the payment method that the customer
    names.
    """
    item: float = 0.0
    """Probability that the expert takes the first item of the order instead of the one that is
    meant.
    """
    payment: float = 0.0
    """Probability that the expert refunds to the first payment method of the record instead of the
    right one.
    """
    variant: float = 0.0
    """Probability that the expert takes the first variant of the list instead of the one that is
    meant.
    """
    point: float = 0.0
    """Probability that the expert sends the parcel to its present pickup point instead of the new
    one.
    """
    cancel: float = 0.0
    """Probability that the expert refuses to cancel a pending order."""


NO_FAULTS = Faults()


def expert_replies(scenario: Scenario, faults: Faults = NO_FAULTS, seed: int = 0) -> list[Message]:
    """Return the replies of the expert. They succeed if the expert ignores no rule.

    The expert's errors are wrong decisions. The format of its calls is always right.
    """
    random = Random(f"{scenario.seed}/{seed}")

    def ignores(rule: str) -> bool:
        return random.random() < float(getattr(faults, rule))

    steps: list[Step] = []
    if scenario.level > 2:
        steps += ["email", ("find_user", {"email": scenario.user.email})]
    replies = [_reply(step) for step in steps]
    for request in scenario.requests:
        steps = ["order", ("get_order", {"order_id": request.order})]
        steps += decide(scenario, request, ignores)
        replies += [_reply(step) for step in steps]
        last_call = steps[-1][0]
        if last_call != "hand_over":
            replies.append(Message("assistant", "Sorry." if last_call == "refuse" else "Done."))
    return replies


def _reply(step: Step) -> Message:
    if isinstance(step, str):
        return Message("assistant", QUESTIONS[step])
    name, arguments = step
    return call_message(name, **arguments)


def call_message(name: str, **arguments: str) -> Message:
    """Return a reply that makes one tool call, with numbers as integers."""
    written = {
        key: int(value) if key.endswith("_id") else value for key, value in arguments.items()
    }
    return Message("assistant", "", (ToolCall(name, written),))


def goal(scenario: Scenario) -> dict[str, Order]:
    """Return the orders as they must be at the end, after the calls that the rules require."""
    desk = scenario.desk.copy()
    for request in scenario.requests:
        name, arguments = correct_call(scenario, request)
        call_tool(desk, name, arguments)
    return desk.orders


def correct_call(scenario: Scenario, request: CustomerRequest) -> Call:
    """Return the tool call that the rules require for a request."""
    call = decide(scenario, request, lambda rule: False)[-1]
    assert isinstance(call, tuple)
    return call


def decide(scenario: Scenario, request: CustomerRequest, ignores: Ignores) -> list[Step]:
    """Return the expert's steps from the moment when it knows the order.

    The last step is the call that changes the order. The earlier ones ask the customer or read
    records.
    """
    order = scenario.desk.orders[request.order]
    wish = request.wish
    number = {"order_id": order.id}
    if scenario.user.account == "business" and not ignores("account"):
        return [("hand_over", number)]
    required = "pending" if wish in ("cancel", "redirect") else "delivered"
    if order.status != required and not ignores("status"):
        if wish == "redirect" and order.status == "shipped":
            return [("hand_over", number)]
        if wish == "return" and order.status == "pending":
            return [("cancel_order", number)]
        return [_refuse(order, "status")]
    if wish == "redirect":
        point = order.point if ignores("point") else request.point
        return ["point", ("redirect_order", {**number, "point_id": point})]
    if wish == "cancel":
        return [_refuse(order, "status") if ignores("cancel") else ("cancel_order", number)]
    if scenario.level > 1 and order.days > 30:
        return [_refuse(order, "window")]
    item = order.items[0] if ignores("item") else request.item
    about_item = _exchange if wish == "exchange" else _return
    return ["item", *about_item(scenario, request, item, ignores)]


def _return(
    scenario: Scenario, request: CustomerRequest, item: str, ignores: Ignores
) -> list[Step]:
    order = scenario.desk.orders[request.order]
    terms = scenario.desk.items[item].terms
    payments = scenario.user.payments
    if terms == "final" and not ignores("final"):
        return [_refuse(order, "final")]
    questions: list[Step] = []
    if terms == "sale" and not ignores("sale"):
        payment = next(p.id for p in payments if p.kind == "gift")
    else:
        questions = ["payment"]
        payment = payments[0].id if ignores("payment") else request.payment
    arguments = {"order_id": order.id, "item_id": item, "payment_id": payment}
    return [*questions, ("return_item", arguments)]


def _exchange(
    scenario: Scenario, request: CustomerRequest, item: str, ignores: Ignores
) -> list[Step]:
    desk = scenario.desk
    order = desk.orders[request.order]
    variants = desk.variants(desk.items[item])
    colour = desk.items[request.new_item].colour
    wanted = [other for other in variants if other.colour == colour]
    chosen = variants[0] if not wanted or ignores("variant") else wanted[0]
    call = ("exchange_item", {"order_id": order.id, "item_id": item, "new_item_id": chosen.id})
    return [
        ("list_variants", {"item_id": item}),
        "colour",
        call if chosen.in_stock else _refuse(order, "stock"),
    ]


def _refuse(order: Order, reason: str) -> Call:
    return "refuse", {"order_id": order.id, "reason": reason}
