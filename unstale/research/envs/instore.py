"""The environment `instore`: the counter of a shop, with returns, reservations and points."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from unstale.envs.desk import desk_spec
from unstale.envs.desk.database import Desk, DeskError, User, numbered
from unstale.envs.desk.domain import Domain, Fact, Ignores, Request, Scenario, Step, Wish, refuse
from unstale.envs.desk.draw import Draw
from unstale.envs.desk.tools import Toolbox

Status = Literal["valid", "locked"]
Payout = Literal["cash", "points"]

PRODUCTS = ("coat", "shirt", "dress", "boots", "jeans", "socks", "gloves", "skirt", "sweater")
SIZES = ("tiny", "small", "medium", "large", "wide", "giant")

POLICY = """You serve the counter of a clothes shop. Customers talk to you; you look things up and \
change things with the tools.

Rules. If several apply, the first one decides.
1. {identify}
2. Look the customer's card up before you decide anything. Ask the customer for what you do not \
know, and end each question with "?". Never invent a number.
3. Cards of staff accounts: do nothing yourself; call hand_over for the card. Your work on it then \
ends.
4. Cards that are locked: hand_over, whatever the customer wants.
5. Taking a bought piece back: pieces marked "final" cannot be taken back: refuse, reason "final". \
Pieces bought more than 30 days ago: refuse, reason "window". Pieces marked "worn" are always paid \
out in points, all others in cash or in points, as the customer says.
6. Swapping a bought piece: only for another size of the same product. List the sizes to find the \
number of the piece. If the wanted size is sold out: refuse, reason "stock". Worn and final pieces \
can be swapped.
7. Reserving: if two pieces are reserved already: refuse, reason "limit". If the wanted size is \
sold out: refuse, reason "stock". Reservations can be dropped at any time.
8. Receipts: if points are missing for a receipt, credit the receipt that the customer names.

A refusal is made by calling refuse with the card and the reason, then telling the customer. When \
all is done, say so in one short sentence without a question."""

WISHES = {
    "return": Wish(
        ("I want to return a piece.", "Please take a piece back."),
        (
            "Hi, something I bought here does not suit me. I'd like to give it back.",
            "Hello, can I return one of the things I bought?",
            "Good morning. I'm not happy with one of my purchases and want to return it.",
        ),
    ),
    "swap": Wish(
        ("I need another size.", "Please swap a piece."),
        (
            "Hello, what I bought doesn't fit. Do you have it in a different size?",
            "Hi, I'd like to swap something I bought for another size.",
            "One of my purchases is the wrong size. Can we change that?",
        ),
    ),
    "reserve": Wish(
        ("Please reserve a piece.", "I want a piece kept for me."),
        (
            "Hi there, could you put something aside for me until tomorrow?",
            "Hello, I'd like to reserve something and pick it up later.",
            "I saw something nice but have no time today. Can you keep it for me?",
        ),
    ),
    "drop": Wish(
        ("Please drop a reservation.", "I do not need a reserved piece."),
        (
            "Hello, I won't pick up one of the things that you keep for me.",
            "Hi, I reserved too much. Please put one of them back on the shelf.",
            "I changed my mind about something I had reserved.",
        ),
    ),
    "credit": Wish(
        ("My points are missing.", "Please credit a receipt."),
        (
            "Hi, I forgot my card last time and got no points.",
            "Hello, the points for one of my receipts never came.",
            "I'd like the points for a purchase added to my card.",
        ),
    ),
}

FACTS = {
    "card": Fact(
        "Which card?",
        (),
        ("Card {}.", "It is {}."),
        ("The card number is {}.", "Here it says {}.", "It's {}, if I can read it."),
    ),
    "piece": Fact(
        "Which piece?",
        ("piece", "product", "which one", "which of", "item"),
        ("The {}.", "My {}."),
        ("It's the {}.", "I mean the {}.", "The {}, please. Nothing else."),
    ),
    "size": Fact(
        "Which size?",
        ("size",),
        ("In {}.", "Make it {}."),
        ("I'd like it in {}.", "Do you have {}?", "{} should fit."),
    ),
    "payout": Fact(
        "Cash or points?",
        ("cash", "points", "pay out", "paid out", "refund"),
        ("In {}.", "{}, please."),
        ("I'd rather have {}.", "Could I get {}?", "{} would be best."),
    ),
    "receipt": Fact(
        "Which receipt?",
        ("receipt",),
        ("Receipt {}.", "Number {}."),
        ("Receipt {}, please.", "The one from last week: {}.", "On top it says {}."),
    ),
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One item of the shop: a product in one size."""

    id: str
    name: str
    size: str
    sold_out: bool


@dataclass(frozen=True, slots=True)
class Purchase:
    """An item that a customer bought."""

    piece: str
    worn: bool
    final: bool
    days: int
    """Number of days since the purchase."""


@dataclass(frozen=True, slots=True)
class Card:
    """A customer's card, with the items that were bought and reserved with it."""

    id: str
    user: str
    status: Status
    bought: tuple[Purchase, ...]
    reserved: tuple[str, ...]
    returned: tuple[tuple[str, str], ...] = ()
    """Returned items, as pairs (number of the item, `cash` or `points`)."""
    receipt: str = ""
    """Number of the receipt whose points were credited to the card. Empty if there is none."""


def purchase_of(card: Card, piece_id: str) -> Purchase:
    """Return the purchase of an item with a card.

    Raises `DeskError` if the card has no such purchase, or the item was returned.
    """
    for purchase in card.bought:
        if purchase.piece == piece_id:
            return purchase
    raise DeskError(f"no piece {piece_id} was bought with card {card.id}")


def sizes(desk: Desk, name: str) -> list[Piece]:
    return [piece for piece in desk[Piece].values() if piece.name == name]


def get_card(desk: Desk, card_id: str) -> Mapping[str, Any]:
    """Look up a card: account, status, bought and reserved pieces."""
    card = desk.get(Card, card_id)
    pieces = desk[Piece]
    return {
        "account": desk[User][card.user].account,
        "status": card.status,
        "bought": [_purchase(desk, purchase) for purchase in card.bought],
        "reserved": [
            {"piece_id": int(number), "name": pieces[number].name} for number in card.reserved
        ],
    }


def _purchase(desk: Desk, purchase: Purchase) -> dict[str, Any]:
    marks = {"worn": purchase.worn, "final": purchase.final}
    name = desk[Piece][purchase.piece].name
    row: dict[str, Any] = {"piece_id": int(purchase.piece), "name": name, **marks}
    return row if desk.terse else {**row, "days_ago": purchase.days}


def list_sizes(desk: Desk, product: str) -> Mapping[str, Any]:
    """List the sizes of a product in the shop, with the numbers of the pieces."""
    pieces = sizes(desk, product.strip().lower())
    if not pieces:
        raise DeskError(f"no product {product}")
    rows = [
        {"piece_id": int(each.id), "size": each.size, "sold_out": each.sold_out} for each in pieces
    ]
    return {"sizes": rows}


def take_back(desk: Desk, card_id: str, piece_id: str, payout: Payout) -> str:
    """Take a bought piece back and pay it out in cash or in points."""
    card = desk.get(Card, card_id)
    bought = tuple(each for each in card.bought if each != purchase_of(card, piece_id))
    desk.put(replace(card, bought=bought, returned=(*card.returned, (piece_id, payout))))
    return "ok"


def swap_piece(desk: Desk, card_id: str, piece_id: str, new_piece_id: str) -> str:
    """Swap a bought piece for another size of the same product."""
    card = desk.get(Card, card_id)
    purchase = purchase_of(card, piece_id)
    others = {piece.id for piece in sizes(desk, desk[Piece][piece_id].name)} - {piece_id}
    if new_piece_id not in others:
        raise DeskError(f"{new_piece_id} is no other size of {piece_id}")
    new = replace(purchase, piece=new_piece_id)
    desk.put(replace(card, bought=tuple(new if p == purchase else p for p in card.bought)))
    return "ok"


def reserve_piece(desk: Desk, card_id: str, piece_id: str) -> str:
    """Reserve a piece of the shop."""
    card, piece = desk.get(Card, card_id), desk.get(Piece, piece_id)
    if piece.id in card.reserved:
        raise DeskError(f"piece {piece_id} is reserved already")
    desk.put(replace(card, reserved=(*card.reserved, piece.id)))
    return "ok"


def drop_piece(desk: Desk, card_id: str, piece_id: str) -> str:
    """Drop the reservation of a piece."""
    card = desk.get(Card, card_id)
    if piece_id not in card.reserved:
        raise DeskError(f"piece {piece_id} is not reserved")
    kept = tuple(number for number in card.reserved if number != piece_id)
    desk.put(replace(card, reserved=kept))
    return "ok"


def credit_receipt(desk: Desk, card_id: str, receipt_id: str) -> str:
    """Add the points of a receipt to a card."""
    receipt = numbered(receipt_id, "receipt")
    desk.put(replace(desk.get(Card, card_id), receipt=receipt))
    return "ok"


def add_pieces(draw: Draw) -> None:
    """Add six products in four sizes each."""
    for name in draw.random.sample(PRODUCTS, 6):
        for size in draw.random.sample(SIZES, 4):
            sold_out = draw.level > 1 and draw.random.random() < 0.2
            draw.desk.put(Piece(draw.number(), name, size, sold_out))


def draw_card(draw: Draw, user: User) -> Card:
    """Return a random card with two or three purchases and a reservation or two."""
    random = draw.random
    names = random.sample(sorted({piece.name for piece in draw.desk[Piece].values()}), 5)
    pieces = [random.choice(sizes(draw.desk, name)).id for name in names]
    bought = tuple(
        Purchase(piece, worn=random.random() < 0.25, final=False, days=random.randrange(1, 30))
        for piece in pieces[: random.choice((2, 3))]
    )
    bought = tuple(replace(each, final=random.random() < 0.2) for each in bought)
    reserved = tuple(pieces[3 : 3 + random.choice((1, 2))])
    status: Status = "locked" if random.random() < 0.2 else "valid"
    return Card(draw.number(), user.id, status, bought, reserved)


KINDS = {
    "return": 0.17,
    "return_worn": 0.12,
    "swap": 0.16,
    "reserve": 0.17,
    "drop": 0.11,
    "credit": 0.08,
    "refuse_limit": 0.05,
    "refuse_rule": 0.05,
    "staff": 0.06,
    "locked": 0.03,
}
"""Share of each kind of request. `refuse_limit` is a third reservation. In `refuse_rule` a rule
forbids the wish: the return of a final piece; from level 2 on also a size that is sold out, or a
late return.
"""


def draw_request(draw: Draw, kind: str, user: User) -> Request:
    """Return a request of the given kind. Add the card that it is about to the database."""
    random, pieces = draw.random, draw.desk[Piece]
    causes = ("final", "stock", "window") if draw.level > 1 else ("final",)
    cause = random.choice(causes) if kind == "refuse_rule" else ""
    wish = {
        "return_worn": "return",
        "refuse_limit": "reserve",
        "refuse_rule": "swap" if cause == "stock" else "return",
        "staff": random.choice(list(WISHES)),
        "locked": random.choice(list(WISHES)),
    }.get(kind, kind)
    card = draw_card(draw, user)
    purchase = random.choice(card.bought)
    if wish == "return":
        days = random.randrange(31, 90) if cause == "window" else random.randrange(1, 30)
        worn = kind == "return_worn"
        changed = Purchase(purchase.piece, worn=worn, final=cause == "final", days=days)
        bought = tuple(changed if each == purchase else each for each in card.bought)
        card, purchase = replace(card, bought=bought), changed
    if wish == "reserve":
        others = {piece.name for piece in pieces.values()}
        owned = [each.piece for each in card.bought] + list(card.reserved)
        names = sorted(others - {pieces[number].name for number in owned})
        piece = random.choice(sizes(draw.desk, random.choice(names)))
        count = 2 if kind == "refuse_limit" else 1
        spare = next(each.id for each in pieces.values() if each.id not in (*owned, piece.id))
        card = replace(card, reserved=(*card.reserved, spare)[:count])
    else:
        name = pieces[purchase.piece].name
        others_of = [each for each in sizes(draw.desk, name) if each.id != purchase.piece]
        piece = random.choice(others_of)
    pieces[piece.id] = piece = replace(piece, sold_out=cause == "stock")
    dropped, payout = random.choice(card.reserved), random.choice(("cash", "points"))
    draw.desk.put(replace(card, status="locked" if kind == "locked" else "valid"))
    receipt, name = draw.number(), pieces[purchase.piece].name
    wants = {
        "bought": purchase.piece,
        "new_piece": piece.id,
        "reserved": dropped,
        "payout": payout,
        "receipt": receipt,
    }
    known = {
        "return": {"piece": name, "payout": payout},
        "swap": {"piece": name, "size": piece.size},
        "reserve": {"piece": piece.name, "size": piece.size},
        "drop": {"piece": pieces[dropped].name},
        "credit": {"receipt": receipt},
    }[wish]
    return Request(kind, wish, card.id, wants, known)


def decide(scenario: Scenario, request: Request, ignores: Ignores) -> list[Step]:
    """Return the steps that a scripted expert takes to serve a request.

    `ignores` returns True for rules that the expert ignores. If it ignores `bought`, `size` or
    `reserved`, the expert takes the first of a list instead of the one that the customer means. If
    it ignores `payout`, it takes cash, and if it ignores `receipt`, the number of the card. If it
    ignores another rule, it does not look at the state of the card or the item.
    """
    wish, wants = request.wish, request.wants
    card = scenario.desk[Card][request.case]
    if card.status == "locked" and not ignores("locked"):
        return [("hand_over", {})]
    if wish == "credit":
        receipt = card.id if ignores("receipt") else wants["receipt"]
        return ["receipt", ("credit_receipt", {"receipt_id": receipt})]
    if wish == "drop":
        number = card.reserved[0] if ignores("reserved") else wants["reserved"]
        return ["piece", ("drop_piece", {"piece_id": number})]
    if wish == "reserve":
        if len(card.reserved) > 1 and not ignores("limit"):
            return [refuse("limit")]
        return ["piece", *_find_size(scenario, request, "", ignores)]
    number = card.bought[0].piece if ignores("bought") else wants["bought"]
    if wish == "swap":
        return ["piece", *_find_size(scenario, request, number, ignores)]
    purchase = purchase_of(card, number)
    if purchase.final and not ignores("final"):
        return ["piece", refuse("final")]
    if purchase.days > 30:
        return ["piece", refuse("window")]
    if purchase.worn and not ignores("worn"):
        return ["piece", ("take_back", {"piece_id": number, "payout": "points"})]
    payout = "cash" if ignores("payout") else wants["payout"]
    return ["piece", "payout", ("take_back", {"piece_id": number, "payout": payout})]


def _find_size(scenario: Scenario, request: Request, number: str, ignores: Ignores) -> list[Step]:
    """Return the steps that find another size and then swap the bought item `number` for it.

    If `number` is empty, the item of that size is reserved instead.
    """
    desk = scenario.desk
    wanted = desk[Piece][request.wants["new_piece"]]
    name = desk[Piece][number].name if number else wanted.name
    others = [piece for piece in sizes(desk, name) if piece.id != number]
    matching = [piece for piece in others if piece.size == wanted.size]
    chosen = others[0] if not matching or ignores("size") else matching[0]
    steps: list[Step] = [("list_sizes", {"product": name}), "size"]
    if chosen.sold_out:
        return [*steps, refuse("stock")]
    if number:
        return [*steps, ("swap_piece", {"piece_id": number, "new_piece_id": chosen.id})]
    return [*steps, ("reserve_piece", {"piece_id": chosen.id})]


INSTORE = Domain(
    name="instore",
    case=Card,
    tools=Toolbox(
        Card,
        reads=(get_card, list_sizes),
        writes=(take_back, swap_piece, reserve_piece, drop_piece, credit_receipt),
        reasons=("final", "window", "stock", "limit"),
        meanings={
            "product": "Name of the product.",
            "piece_id": "Number of the piece.",
            "payout": "What the customer gets.",
            "new_piece_id": "Number of the piece that the customer gets instead.",
            "receipt_id": "Number of the receipt.",
        },
    ),
    kinds=KINDS,
    handed_over=("locked",),
    wishes=WISHES,
    facts=FACTS,
    brief="Keep the rules of the counter.",
    policy=POLICY,
    add_stock=add_pieces,
    draw_case=draw_card,
    draw_request=draw_request,
    decide=decide,
    faults=(
        "locked",
        "final",
        "worn",
        "limit",
        "bought",
        "size",
        "reserved",
        "payout",
        "receipt",
    ),
    accounts=("regular", "staff"),
)

ENV = desk_spec(INSTORE)
