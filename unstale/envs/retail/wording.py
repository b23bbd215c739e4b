"""The texts of the desk: names, the policy, tool schemas, the words of customers and expert."""

from collections.abc import Mapping
from typing import Any

from unstale.envs import tool_schema
from unstale.envs.retail.database import REASONS
from unstale.envs.retail.tools import ARGUMENTS

NAMES = (
    "mug", "lamp", "kettle", "scarf", "jacket", "tent", "chair", "clock", "radio", "pillow", "basket", "mirror",
    "bottle", "helmet", "carpet", "blanket", "vase", "drill", "fan", "desk", "bag", "hat", "belt", "camera",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "black", "white", "grey", "yellow", "brown")
PAYMENTS = ("card", "bank", "wallet")
"""Payment methods in addition to the gift balance, which every customer has."""
PEOPLE = (
    "Ada Lindqvist", "Bela Horvat", "Chidi Okafor", "Dana Petrov", "Emre Yilmaz", "Farah Nasser", "Goran Ilic",
    "Hana Sato", "Ivo Marek", "Jun Park", "Kofi Mensah", "Lena Vogel", "Mina Rossi", "Nils Berg", "Olga Duarte",
)  # fmt: skip

BRIEF = "Keep the rules of the desk."
"""The policy text at level 1. It is short, because the small base model already knows the rules."""

POLICY = """You serve the help desk of a shop. Customers write to you; you look things up and change things with \
the tools.

Rules:
1. {identify}
2. Look an order up before you decide anything about it. Ask the customer for what you do not know; never invent a \
number.
3. Orders of business accounts: do nothing yourself; call hand_over for the order. Your work on it then ends.
4. Cancelling: only orders that are pending. Anything else: refuse, reason "status".
5. Returning: only delivered orders. If the order is still pending, cancel it instead of returning anything. If it is \
shipped: refuse, reason "status".
6. Items marked "final" cannot be returned: refuse, reason "final". They can be exchanged.
7. Refunds go to the payment method the customer names, except that items marked "sale" are always refunded to the \
customer's gift balance, whatever the customer says.
8. Exchanging: only delivered orders, otherwise refuse, reason "status"; only for another colour of the same \
product. List the variants to find the new item's number.{stock}
9. Redirecting to another pickup point: only pending orders. If the order is shipped: hand_over. If it is delivered: \
refuse, reason "status".
{window}
A refusal is made by calling refuse with the order and the reason, then telling the customer. When all is done, say \
so in one short sentence without a question."""
IDENTIFY = "Identify the customer first: ask for the email address and look it up with find_user."
TRUST = "The customer is identified already. Ask for the order number."
STOCK = ' If the wanted one is out of stock: refuse, reason "stock".'
WINDOW = """10. Items delivered more than 30 days ago can be neither returned nor exchanged: refuse, reason "window".
"""

_PURPOSE = {
    "find_user": "Find a customer by email address; gives the account and the numbers of the customer's orders.",
    "get_order": "Look up an order: account, status, items, payment methods, pickup point.",
    "list_variants": "List the other variants of an item's product, with their numbers.",
    "cancel_order": "Cancel a whole order.",
    "return_item": "Take one item of an order back and refund it to a payment method.",
    "exchange_item": "Exchange one item of an order for another variant of the same product.",
    "redirect_order": "Send an order to another pickup point.",
    "refuse": "Note that a request about an order is refused, and why.",
    "hand_over": "Hand an order's case over to a human colleague.",
}
_MEANING = {
    "email": "The customer's email address.",
    "order_id": "Number of the order.",
    "item_id": "Number of the item.",
    "payment_id": "Number of the payment method that gets the refund.",
    "new_item_id": "Number of the variant the customer gets instead.",
    "point_id": "Number of the pickup point.",
    "reason": "The rule the refusal rests on.",
}


def schema(name: str) -> Mapping[str, Any]:
    """Return the JSON schema of a tool, in the format that chat templates expect."""
    properties: dict[str, Any] = {}
    for key in ARGUMENTS[name]:
        kind = "integer" if key.endswith("_id") else "string"
        properties[key] = {"type": kind, "description": _MEANING[key]}
        if key == "reason":
            properties[key]["enum"] = list(REASONS)
    return tool_schema(name, _PURPOSE[name], properties)


WISHES: Mapping[str, tuple[str, ...]] = {
    "cancel": ("Please cancel my order.", "I want to cancel an order."),
    "return": ("I want to return an item.", "Please take an item back."),
    "exchange": ("I want to exchange an item.", "Please swap an item."),
    "redirect": ("Please send my order elsewhere.", "I want to redirect my order."),
}
FREE_WISHES: Mapping[str, tuple[str, ...]] = {
    "cancel": (
        "Hi, I changed my mind about something I ordered and would like the whole order cancelled.",
        "Hello! Could you call off an order of mine? I found it cheaper elsewhere.",
        "I don't need what I ordered any more. Please cancel it.",
    ),
    "return": (
        "Hello, something I bought from you isn't what I expected. I'd like to give it back and get my money.",
        "Hi there. I have one thing here I want to return, please.",
        "Good morning, I need a refund for one of the things I ordered.",
    ),
    "exchange": (
        "Hi, I like what I got but not its colour. Can I swap it?",
        "Hello, I'd like to exchange something for the same thing in another colour.",
        "One of the things I ordered would look better in a different colour. Could we change that?",
    ),
    "redirect": (
        "Hi! I'm travelling and can't get to my usual pickup point. Can the parcel go to another one?",
        "Could you please have my order sent to a different pickup point?",
        "I moved. My order should go to another pickup point than the one on file.",
    ),
}

TERSE_ANSWERS: Mapping[str, tuple[str, ...]] = {
    "email": ("{}",),
    "order": ("Order {}.", "It is {}."),
    "item": ("The {}.", "My {}."),
    "payment": ("To my {}.", "My {}."),
    "colour": ("In {}.", "Make it {}."),
    "point": ("To {}.", "Point {}."),
}
FREE_ANSWERS: Mapping[str, tuple[str, ...]] = {
    "email": ("My email is {}.", "Sure, it's {}", "You have me as {}, I think."),
    "order": ("The order number is {}.", "Let me look... it says {}.", "That's {} on the receipt."),
    "item": ("It's the {}.", "I mean the {}.", "The {}, please. The rest is fine."),
    "payment": (
        "Please put it on my {}.",
        "I'd rather have it on the {}.",
        "My {}, if that's possible.",
    ),
    "colour": ("I'd like it in {}.", "Do you have it in {}?", "{}, please."),
    "point": ("Pickup point {}, please.", "The one close to my work: {}.", "Could it go to {}?"),
}
QUESTIONS: Mapping[str, str] = {
    "email": "Your email?",
    "order": "Which order?",
    "item": "Which item?",
    "payment": "Refund to what?",
    "colour": "Which colour?",
    "point": "Where to?",
}
"""The question by which the scripted expert asks the customer for each kind of fact."""

HEARD: Mapping[str, tuple[str, ...]] = {
    "email": ("email", "e-mail", "mail address"),
    "order": (
        "which order",
        "order number",
        "number of the order",
        "order id",
        "number of your order",
    ),
    "item": ("which item", "what item", "which product", "which one", "which of"),
    "payment": ("refund to", "payment", "refunded to", "refund go", "money back to"),
    "colour": ("colour", "color", "variant"),
    "point": ("where to", "point", "where should", "address"),
}
"""Words by which the customer recognises a question about each kind of fact. The kinds are tried in
this order.
"""
