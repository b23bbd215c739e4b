"""The records that the desk's tools return: short lines at level 1, JSON at higher levels.

In short lines, each name and number follows a space, and a number follows its name. Calls and the
customer's answers are written the same way. So the tokenizer makes the same token of a name or
number everywhere, and the policy can copy it. A mark (`sale`, `final`) precedes the name of its
item.
"""

import json

from unstale.envs.retail.database import Desk, Item, Order, User


def user_record(desk: Desk, user: User) -> str:
    orders = [order.id for order in desk.orders.values() if order.user == user.id]
    if desk.terse:
        return f"{user.account}; orders: " + ", ".join(orders)
    return json.dumps(
        {"name": user.name, "account": user.account, "orders": [int(order) for order in orders]}
    )


def order_record(desk: Desk, order: Order) -> str:
    user = desk.users[order.user]
    items = [desk.items[item] for item in order.items]
    if desk.terse:
        goods = ", ".join(
            f"{'' if item.terms == 'regular' else item.terms + ' '}{item.name} {item.id}"
            for item in items
        )
        payments = ", ".join(f"{payment.kind} {payment.id}" for payment in user.payments)
        return (
            f"{user.account}, {order.status}; items: {goods}; pay: {payments}; point {order.point}"
        )
    record = {
        "order_id": int(order.id),
        "account": user.account,
        "status": order.status,
        "days_since_delivery": order.days if order.status == "delivered" else None,
        "items": [
            {"item_id": int(i.id), "name": i.name, "colour": i.colour, "terms": i.terms}
            for i in items
        ],
        "payment_methods": [
            {"payment_id": int(payment.id), "kind": payment.kind} for payment in user.payments
        ],
        "paid_with": int(order.paid_with),
        "point_id": int(order.point),
    }
    return json.dumps(record)


def variants_record(desk: Desk, item: Item) -> str:
    others = desk.variants(item)
    if desk.terse:
        return "colours: " + ", ".join(f"{other.colour} {other.id}" for other in others)
    rows = [
        {"item_id": int(other.id), "colour": other.colour, "in_stock": other.in_stock}
        for other in others
    ]
    return json.dumps({"product": item.name, "variants": rows})
