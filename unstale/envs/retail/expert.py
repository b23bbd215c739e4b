"""A scripted expert, which can be made to err in its decisions but not in its format."""

from dataclasses import dataclass
from random import Random

from unstale.envs import Message, ToolCall
from unstale.envs.retail.database import Order
from unstale.envs.retail.tasks import Call, CustomerRequest, Scenario
from unstale.envs.retail.wording import QUESTIONS


@dataclass(frozen=True, slots=True)
class Faults:
    """The probabilities, independent of each other, with which the expert ignores a rule."""

    status: float = 0.0
    """Ignore the order's status."""
    account: float = 0.0
    """Ignore the kind of account."""
    final: float = 0.0
    """Take back final items."""
    sale: float = 0.0
    """Refund sale items to the payment method that the customer names."""
    item: float = 0.0
    """Take the first item of the order."""
    payment: float = 0.0
    """Refund to the first payment method of the record."""
    variant: float = 0.0
    """Take the first variant of the list."""
    point: float = 0.0
    """Send the parcel to its present pickup point."""
    cancel: float = 0.0
    """Refuse to cancel a pending order."""


NO_FAULTS = Faults()


def expert_replies(scenario: Scenario, faults: Faults = NO_FAULTS, seed: int = 0) -> list[Message]:
    """Return the expert's replies. Without faults they reach the goal."""
    random = Random(f"{scenario.seed}/{seed}")
    replies: list[Message] = []
    if scenario.level > 2:
        replies += [_ask("email"), _call(("find_user", {"email": scenario.user.email}))]
    for request in scenario.requests:
        order = scenario.desk.orders[request.order]
        replies += [_ask("order"), _call(("get_order", {"order_id": order.id}))]
        replies += _Decision(scenario, request, order, faults, random).replies()
    return replies


@dataclass(frozen=True, slots=True)
class _Decision:
    """The expert's decision about an order that it has looked up."""

    scenario: Scenario
    request: CustomerRequest
    order: Order
    faults: Faults
    random: Random

    def errs(self, kind: str) -> bool:
        return self.random.random() < getattr(self.faults, kind)

    def replies(self) -> list[Message]:
        if self.scenario.user.account == "business" and not self.errs("account"):
            return [_call(("hand_over", {"order_id": self.order.id}))]
        if self.request.wish in ("cancel", "redirect"):
            return self._whole_order()
        return self._one_item()

    def _whole_order(self) -> list[Message]:
        number = {"order_id": self.order.id}
        redirect = self.request.wish == "redirect"
        if self.order.status != "pending" and not self.errs("status"):
            if redirect and self.order.status == "shipped":
                return [_call(("hand_over", number))]
            return self._refuse("status")
        if redirect:
            point = self.order.point if self.errs("point") else self.request.point
            return [
                _ask("point"),
                _call(("redirect_order", {**number, "point_id": point})),
                _say("Done."),
            ]
        if self.errs("cancel"):
            return self._refuse("status")
        return [_call(("cancel_order", number)), _say("Done.")]

    def _one_item(self) -> list[Message]:
        number = {"order_id": self.order.id}
        if self.order.status != "delivered" and not self.errs("status"):
            if self.request.wish == "return" and self.order.status == "pending":
                return [_call(("cancel_order", number)), _say("Done.")]
            return self._refuse("status")
        if self.scenario.level > 1 and self.order.days > 30:
            return self._refuse("window")
        item = self.order.items[0] if self.errs("item") else self.request.item
        return [
            _ask("item"),
            *(self._exchange(item) if self.request.wish == "exchange" else self._return(item)),
        ]

    def _return(self, item: str) -> list[Message]:
        terms = self.scenario.desk.items[item].terms
        payments = self.scenario.user.payments
        if terms == "final" and not self.errs("final"):
            return self._refuse("final")
        if terms == "sale" and not self.errs("sale"):
            questions = []
            payment = next(p.id for p in payments if p.kind == "gift")
        else:
            questions = [_ask("payment")]
            payment = payments[0].id if self.errs("payment") else self.request.payment
        arguments = {"order_id": self.order.id, "item_id": item, "payment_id": payment}
        return [*questions, _call(("return_item", arguments)), _say("Done.")]

    def _exchange(self, item: str) -> list[Message]:
        desk = self.scenario.desk
        variants = desk.variants(desk.items[item])
        colour = desk.items[self.request.new_item].colour
        wanted = [other for other in variants if other.colour == colour]
        chosen = variants[0] if not wanted or self.errs("variant") else wanted[0]
        lookup = [_call(("list_variants", {"item_id": item})), _ask("colour")]
        if not chosen.in_stock:
            return [*lookup, *self._refuse("stock")]
        arguments = {"order_id": self.order.id, "item_id": item, "new_item_id": chosen.id}
        return [*lookup, _call(("exchange_item", arguments)), _say("Done.")]

    def _refuse(self, reason: str) -> list[Message]:
        return [_call(("refuse", {"order_id": self.order.id, "reason": reason})), _say("Sorry.")]


def _ask(kind: str) -> Message:
    return Message("assistant", QUESTIONS[kind])


def _say(text: str) -> Message:
    return Message("assistant", text)


def _call(call: Call) -> Message:
    name, arguments = call
    written = {
        key: int(value) if key.endswith("_id") else value for key, value in arguments.items()
    }
    return Message("assistant", "", (ToolCall(name, written),))
