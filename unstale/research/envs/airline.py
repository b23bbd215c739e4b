"""The environment `airline`: the service desk of an airline, with refunds, rebookings and bags."""

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
from unstale.envs.desk.draw import DAYS, Draw
from unstale.envs.desk.tools import Toolbox

Status = Literal["booked", "checked in", "flown"]
Fare = Literal["basic", "flex"]

CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Paris", "Delhi", "Quito", "Tokyo")
TRAVELLERS = ("Anna", "Ben", "Carl", "Dora", "Eva", "Finn", "Gina", "Hugo", "Iris", "Karl")
PAYMENTS = ("voucher", "card", "bank", "wallet")
"""Payment methods. Every customer has a voucher account and one of the others."""

POLICY = """You serve the desk of an airline. Customers write to you; you look things up and \
change things with the tools.

Rules. If several apply, the first one decides.
1. {identify}
2. Look a booking up before you decide anything about it. Ask the customer for what you do not \
know, and end each question with "?". Never invent a number.
3. Bookings of agency accounts: do nothing yourself; call hand_over for the booking. Your work on \
it then ends.
4. Bookings that are flown: refuse everything, reason "status".
5. Refunding one passenger's ticket: to the payment method the customer names, except that tickets \
of a "basic" fare are always refunded to the customer's voucher account, whatever the customer says.
6. Changing to another day: if the passengers are checked in: hand_over. Only "flex" fares, \
otherwise refuse, reason "fare". If the airline has cancelled the flight, basic fares can be \
changed too. List the flights to find the number of the new one. If it is full: refuse, reason \
"full".
7. Bags: one for each passenger. If the passenger has one already: refuse, reason "limit".
8. Seats: assign the seat that the customer names to the passenger.

A refusal is made by calling refuse with the booking and the reason, then telling the customer. \
When all is done, say so in one short sentence without a question."""

WISHES = {
    "refund": Wish(
        ("Please refund a ticket.", "I want my money back."),
        (
            "Hello, one of us cannot travel. I'd like the money back for that ticket.",
            "Hi! Somebody on my booking is ill and stays at home. Please refund that seat.",
            "Good evening. I booked for too many people and need one ticket refunded.",
        ),
    ),
    "change": Wish(
        ("I want to fly another day.", "Please change my flight."),
        (
            "Hi, my plans have moved. Can we fly on a different day?",
            "Hello, could you put our booking on another flight, please?",
            "We can't make the date we booked. I'd like to move the trip.",
        ),
    ),
    "bag": Wish(
        ("I want to add a bag.", "Please add a bag."),
        (
            "Hello! We have more to carry than I thought. Can I add a suitcase?",
            "Hi, I'd like to check in a bag for somebody on my booking.",
            "We need one more piece of luggage, please.",
        ),
    ),
    "seat": Wish(
        ("I want another seat.", "Please change a seat."),
        (
            "Hi there, could somebody on my booking sit somewhere else?",
            "Hello, I'd like to pick a seat for one of us.",
            "The seat we were given is no good. Can we have another one?",
        ),
    ),
}

FACTS = {
    "booking": Fact(
        "Which booking?",
        ("confirmation number",),
        ("Booking {}.", "It is {}."),
        ("The booking number is {}.", "My confirmation says {}.", "It's {}, I think."),
    ),
    "passenger": Fact(
        "Which passenger?",
        ("passenger", "traveller", "whose", "whom", "who is", "who needs", "who should"),
        ("For {}.", "It is {}."),
        ("It's for {}.", "I mean {}.", "{}. The others stay as they are."),
    ),
    "payment": REFUND_TO,
    "day": Fact(
        "Which day?",
        ("day", "date", "which flight", "what flight", "when"),
        ("On {}.", "{}, please."),
        ("{} would be good.", "Is there anything on {}?", "We could go on {}."),
    ),
    "seat": Fact(
        "Which seat?",
        ("seat",),
        ("Seat {}.", "I want {}."),
        ("Seat {}, please.", "The one by the door: {}.", "Could it be {}?"),
    ),
}


@dataclass(frozen=True, slots=True)
class Flight:
    """A flight. A booking can be moved to another flight to the same city."""

    id: str
    city: str
    day: str
    cancelled: bool
    full: bool


@dataclass(frozen=True, slots=True)
class Passenger:
    id: str
    name: str
    seat: str
    bag: bool
    refunded_to: str = ""
    """Number of the payment method to which the ticket was refunded. Empty without a refund."""


@dataclass(frozen=True, slots=True)
class Booking:
    id: str
    user: str
    status: Status
    fare: Fare
    flight: str
    passengers: tuple[Passenger, ...]


def passenger_of(booking: Booking, passenger_id: str) -> Passenger:
    """Return the passenger of a booking with this number.

    Raises `DeskError` if there is none, or if the passenger's ticket was refunded.
    """
    for passenger in booking.passengers:
        if passenger.id == passenger_id and not passenger.refunded_to:
            return passenger
    raise DeskError(f"no passenger {passenger_id} in booking {booking.id}")


def change_passenger(desk: Desk, booking_id: str, passenger_id: str, **changes: Any) -> str:
    booking = desk.get(Booking, booking_id)
    changed = replace(passenger_of(booking, passenger_id), **changes)
    desk.put(replace(booking, passengers=with_record(booking.passengers, changed)))
    return "ok"


def other_flights(desk: Desk, booking: Booking) -> list[Flight]:
    """Return the other flights to the city of a booking, without cancelled ones."""
    city = desk[Flight][booking.flight].city
    return [
        flight
        for flight in desk[Flight].values()
        if flight.city == city and flight.id != booking.flight and not flight.cancelled
    ]


def get_booking(desk: Desk, booking_id: str) -> Mapping[str, Any]:
    """Look up a booking: account, status, fare, flight, passengers, payment methods."""
    booking = desk.get(Booking, booking_id)
    user, flight = desk[User][booking.user], desk[Flight][booking.flight]
    return {
        "account": user.account,
        "status": booking.status,
        "fare": booking.fare,
        "flight_cancelled": flight.cancelled,
        "city": flight.city,
        "day": flight.day,
        "passengers": [
            {"passenger_id": int(each.id), "name": each.name, "bag": each.bag}
            for each in booking.passengers
        ],
        "pay": user.payment_rows(),
    }


def list_flights(desk: Desk, booking_id: str) -> Mapping[str, Any]:
    """List the other flights to the city of a booking, with their numbers."""
    flights = other_flights(desk, desk.get(Booking, booking_id))
    rows = [{"flight_id": int(each.id), "day": each.day, "full": each.full} for each in flights]
    return {"flights": rows}


def refund_ticket(desk: Desk, booking_id: str, passenger_id: str, payment_id: str) -> str:
    """Cancel the ticket of one passenger and refund it to a payment method."""
    user = desk[User][desk.get(Booking, booking_id).user]
    user.require_payment(payment_id)
    return change_passenger(desk, booking_id, passenger_id, refunded_to=payment_id)


def change_flight(desk: Desk, booking_id: str, flight_id: str) -> str:
    """Move a booking to another flight to the same city."""
    booking = desk.get(Booking, booking_id)
    if flight_id not in {flight.id for flight in other_flights(desk, booking)}:
        raise DeskError(f"no flight {flight_id} for booking {booking_id}")
    desk.put(replace(booking, flight=flight_id))
    return "ok"


def add_bag(desk: Desk, booking_id: str, passenger_id: str) -> str:
    """Add a bag for a passenger who has none."""
    if passenger_of(desk.get(Booking, booking_id), passenger_id).bag:
        raise DeskError(f"passenger {passenger_id} has a bag already")
    return change_passenger(desk, booking_id, passenger_id, bag=True)


def assign_seat(desk: Desk, booking_id: str, passenger_id: str, seat_id: str) -> str:
    """Give a passenger another seat."""
    seat = numbered(seat_id, "seat")
    return change_passenger(desk, booking_id, passenger_id, seat=seat)


def add_flights(draw: Draw) -> None:
    """Add flights to three cities, on four days each."""
    for city in draw.random.sample(CITIES, 3):
        for day in draw.random.sample(DAYS, 4):
            full = draw.level > 1 and draw.random.random() < 0.2
            draw.desk.put(Flight(draw.number(), city, day, cancelled=False, full=full))


def draw_booking(draw: Draw, user: User) -> Booking:
    """Return a random booking of two or three passengers."""
    random = draw.random
    flight = random.choice([f for f in draw.desk[Flight].values() if not f.cancelled])
    names = random.sample(TRAVELLERS, random.choice((2, 3)))
    passengers = tuple(
        Passenger(draw.number(), name, draw.number(), bag=random.random() < 0.3) for name in names
    )
    status: Status = random.choice(("booked", "checked in", "flown"))
    fare: Fare = random.choice(("basic", "flex"))
    return Booking(draw.number(), user.id, status, fare, flight.id, passengers)


KINDS = {
    "refund": 0.17,
    "refund_basic": 0.13,
    "change": 0.16,
    "change_cancelled": 0.06,
    "bag": 0.18,
    "seat": 0.11,
    "refuse_status": 0.05,
    "refuse_rule": 0.05,
    "agency": 0.06,
    "change_checked_in": 0.03,
}
"""Share of each kind of request. `change_cancelled` is the change of a basic fare, on a flight that
the airline has cancelled. In `refuse_rule` a rule forbids the wish: a basic fare; from level 2 on
also a full flight or a second bag.
"""


def draw_request(draw: Draw, kind: str, user: User) -> Request:
    """Return a request of the given kind. Add the booking that it is about to the database."""
    random, flights = draw.random, draw.desk[Flight]
    causes = ("fare", "full", "limit") if draw.level > 1 else ("fare",)
    cause = random.choice(causes) if kind == "refuse_rule" else ""
    wish = kind.partition("_")[0] if kind.partition("_")[0] in WISHES else ""
    wish = {"fare": "change", "full": "change", "limit": "bag"}.get(cause, wish)
    wish = wish or random.choice(list(WISHES))
    booking = draw_booking(draw, user)
    flight = flights[booking.flight]
    target = random.choice(other_flights(draw.desk, booking))
    passenger = replace(random.choice(booking.passengers), bag=cause == "limit")
    status: Status = random.choice(("booked", "checked in"))
    if wish == "change":
        status = "booked"
    fare = booking.fare
    if wish == "change" or kind == "refund":
        fare = "flex"
    if cause == "fare" or kind in ("refund_basic", "change_cancelled"):
        fare = "basic"
    if kind == "change_checked_in":
        status = "checked in"
    if kind == "refuse_status":
        status = "flown"
    if kind == "change_cancelled":
        flight = replace(flight, id=draw.number(), cancelled=True)
        flights[flight.id] = flight
        booking = replace(booking, flight=flight.id)
    flights[target.id] = replace(target, full=cause == "full")
    passengers = with_record(booking.passengers, passenger)
    draw.desk.put(replace(booking, status=status, fare=fare, passengers=passengers))
    payment, seat = random.choice(user.payments), draw.number()
    wants = {
        "passenger": passenger.id,
        "payment": payment.id,
        "flight": target.id,
        "seat": seat,
    }
    known = {
        "refund": {"passenger": passenger.name, "payment": payment.kind},
        "change": {"day": target.day},
        "bag": {"passenger": passenger.name},
        "seat": {"passenger": passenger.name, "seat": seat},
    }[wish]
    return Request(kind, wish, booking.id, wants, known)


def decide(scenario: Scenario, request: Request, ignores: Ignores) -> list[Step]:
    """Return the steps that a scripted expert takes to serve a request.

    `ignores` returns True for rules that the expert ignores. If it ignores `passenger`, `payment`
    or `flight`, the expert takes the first of a list instead of the one that the customer means. If
    it ignores `seat`, it keeps the present seat. If it ignores another rule, it does not look at
    the fare or the state of the booking.
    """
    booking = scenario.desk[Booking][request.case]
    if booking.status == "flown" and not ignores("status"):
        return [refuse("status")]
    if request.wish == "change":
        return _change(scenario, request, booking, ignores)
    first = booking.passengers[0]
    number = first.id if ignores("passenger") else request.wants["passenger"]
    passenger = {"passenger_id": number}
    if request.wish == "bag":
        has_bag = passenger_of(booking, number).bag
        return ["passenger", refuse("limit") if has_bag else ("add_bag", passenger)]
    if request.wish == "seat":
        seat = passenger_of(booking, number).seat if ignores("seat") else request.wants["seat"]
        return ["passenger", "seat", ("assign_seat", {**passenger, "seat_id": seat})]
    if booking.fare == "basic" and not ignores("fare"):
        voucher = scenario.user.payment_of("voucher")
        return ["passenger", ("refund_ticket", {**passenger, "payment_id": voucher})]
    first_payment = scenario.user.payments[0].id
    payment = first_payment if ignores("payment") else request.wants["payment"]
    return ["passenger", "payment", ("refund_ticket", {**passenger, "payment_id": payment})]


def _change(scenario: Scenario, request: Request, booking: Booking, ignores: Ignores) -> list[Step]:
    desk = scenario.desk
    if booking.status == "checked in" and not ignores("check_in"):
        return [("hand_over", {})]
    is_fixed = booking.fare == "basic" and not desk[Flight][booking.flight].cancelled
    if is_fixed and not ignores("fare"):
        return [refuse("fare")]
    chosen = request.wants["flight"]
    if ignores("flight"):
        chosen = other_flights(desk, booking)[0].id
    call = ("change_flight", {"flight_id": chosen})
    return [("list_flights", {}), "day", refuse("full") if desk[Flight][chosen].full else call]


AIRLINE = Domain(
    name="airline",
    case=Booking,
    tools=Toolbox(
        Booking,
        reads=(get_booking, list_flights),
        writes=(refund_ticket, change_flight, add_bag, assign_seat),
        reasons=("status", "fare", "full", "limit"),
        meanings={
            "passenger_id": "Number of the passenger.",
            "payment_id": "Number of the payment method that gets the refund.",
            "flight_id": "Number of the new flight.",
            "seat_id": "Number of the new seat.",
        },
    ),
    kinds=KINDS,
    handed_over=("change_checked_in",),
    wishes=WISHES,
    facts=FACTS,
    brief="Keep the rules of the airline.",
    policy=POLICY,
    add_stock=add_flights,
    draw_case=draw_booking,
    draw_request=draw_request,
    decide=decide,
    faults=("status", "fare", "check_in", "passenger", "payment", "flight", "seat"),
    accounts=("personal", "agency"),
    payments=PAYMENTS,
)

ENV = desk_spec(AIRLINE)
