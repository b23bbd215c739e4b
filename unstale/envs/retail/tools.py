"""The tools that read and change the shop's database.

A call is an error if its arguments do not exist or do not belong together. A call that breaks a
rule of the shop is no error. It changes the database, so the reward is lost.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

from unstale.envs.retail.database import REASONS, Desk, DeskError
from unstale.envs.retail.records import order_record, user_record, variants_record


def call_tool(desk: Desk, name: str, arguments: Mapping[str, Any]) -> str:
    """Carry out a tool call and return the answer. Raises `DeskError` for an impossible call."""
    if name not in TOOLS:
        raise DeskError(f"unknown tool {name!r}; tools are {', '.join(TOOLS)}")
    wanted = ARGUMENTS[name]
    if set(arguments) != set(wanted):
        raise DeskError(
            f"{name} takes {', '.join(wanted)}; got {', '.join(map(str, arguments)) or 'nothing'}"
        )
    values = {key: _read(key, value) for key, value in arguments.items()}
    answer = TOOLS[name](desk, **values)
    if name not in READS:
        desk.writes.append(name)
    return answer


def _read(key: str, value: Any) -> str:
    """Return an argument as text. A call may give a number as an integer or as digits."""
    if isinstance(value, str) or (
        isinstance(value, int) and not isinstance(value, bool) and key.endswith("_id")
    ):
        return str(value)
    raise DeskError(f"{key} must be {'an integer' if key.endswith('_id') else 'a string'}")


def find_user(desk: Desk, email: str) -> str:
    for user in desk.users.values():
        if user.email == email.strip().lower():
            return user_record(desk, user)
    raise DeskError(f"no user with email {email}")


def get_order(desk: Desk, order_id: str) -> str:
    return order_record(desk, desk.order(order_id))


def list_variants(desk: Desk, item_id: str) -> str:
    if item_id not in desk.items:
        raise DeskError(f"no item {item_id}")
    return variants_record(desk, desk.items[item_id])


def cancel_order(desk: Desk, order_id: str) -> str:
    order = desk.order(order_id)
    if order.status == "cancelled":
        raise DeskError(f"order {order_id} is cancelled already")
    desk.orders[order_id] = replace(order, status="cancelled")
    return "ok"


def return_item(desk: Desk, order_id: str, item_id: str, payment_id: str) -> str:
    order = desk.order(order_id)
    item = desk.item_of(order, item_id)
    if payment_id not in {payment.id for payment in desk.users[order.user].payments}:
        raise DeskError(f"no payment method {payment_id}")
    desk.orders[order_id] = replace(order, returned=(*order.returned, (item.id, payment_id)))
    return "ok"


def exchange_item(desk: Desk, order_id: str, item_id: str, new_item_id: str) -> str:
    order = desk.order(order_id)
    item = desk.item_of(order, item_id)
    if new_item_id not in {other.id for other in desk.variants(item)}:
        raise DeskError(f"{new_item_id} is no variant of {item_id}")
    desk.orders[order_id] = replace(order, exchanged=(*order.exchanged, (item.id, new_item_id)))
    return "ok"


def redirect_order(desk: Desk, order_id: str, point_id: str) -> str:
    if not (len(point_id) in (2, 4) and point_id.isascii() and point_id.isdigit()):
        raise DeskError(f"no pickup point {point_id}")
    desk.orders[order_id] = replace(desk.order(order_id), point=point_id)
    return "ok"


def refuse(desk: Desk, order_id: str, reason: str) -> str:
    if reason not in REASONS:
        raise DeskError(f"reason must be one of {', '.join(REASONS)}")
    order = desk.order(order_id)
    desk.orders[order_id] = replace(order, refused=tuple(sorted({*order.refused, reason})))
    return "noted"


def hand_over(desk: Desk, order_id: str) -> str:
    desk.orders[order_id] = replace(desk.order(order_id), handed_over=True)
    return "a colleague takes over"


READS: dict[str, Callable[..., str]] = {
    "find_user": find_user,
    "get_order": get_order,
    "list_variants": list_variants,
}
TOOLS = READS | {
    "cancel_order": cancel_order,
    "return_item": return_item,
    "exchange_item": exchange_item,
    "redirect_order": redirect_order,
    "refuse": refuse,
    "hand_over": hand_over,
}
ARGUMENTS = {name: tuple(signature(tool).parameters)[1:] for name, tool in TOOLS.items()}
