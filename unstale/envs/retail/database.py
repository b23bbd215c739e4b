"""The database of the desk's shop: users with their payment methods, items and orders."""

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["pending", "shipped", "delivered", "cancelled"]
Terms = Literal["regular", "sale", "final"]

REASONS = ("status", "final", "window", "stock")
"""Reasons for refusing a request. Each is a rule of the shop's policy."""


class DeskError(Exception):
    """Error of a tool call that cannot be made. The agent receives its text."""


@dataclass(frozen=True, slots=True)
class Payment:
    id: str
    kind: str


@dataclass(frozen=True, slots=True)
class User:
    id: str
    name: str
    email: str
    account: Literal["personal", "business"]
    payments: tuple[Payment, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One variant of a product."""

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
    """Number of the pickup point of the order."""
    days: int
    """Days since the order was delivered; 0 before that."""
    returned: tuple[tuple[str, str], ...] = ()
    """Returned items, as pairs `(item, payment method that was refunded)`."""
    exchanged: tuple[tuple[str, str], ...] = ()
    """Exchanged items, as pairs `(old item, new item)`."""
    refused: tuple[str, ...] = ()
    """Reasons of the requests about this order that were refused."""
    handed_over: bool = False


@dataclass(slots=True)
class Desk:
    """The database of one episode. The reward compares its orders with the correct ones."""

    users: dict[str, User]
    items: dict[str, Item]
    orders: dict[str, Order]
    terse: bool = True
    """True if tools answer in short lines instead of JSON."""
    writes: list[str] = field(default_factory=list)
    """Names of the calls that changed the database, in order."""

    def copy(self) -> "Desk":
        return Desk(self.users, self.items, dict(self.orders), self.terse)

    def order(self, order_id: str) -> Order:
        if order_id not in self.orders:
            raise DeskError(f"no order {order_id}")
        return self.orders[order_id]

    def item_of(self, order: Order, item_id: str) -> Item:
        gone = {item for item, _ in order.returned + order.exchanged}
        if item_id not in order.items or item_id in gone:
            raise DeskError(f"no item {item_id} in order #{order.id}")
        return self.items[item_id]

    def variants(self, item: Item) -> list[Item]:
        return [
            other
            for other in self.items.values()
            if other.name == item.name and other.id != item.id
        ]
