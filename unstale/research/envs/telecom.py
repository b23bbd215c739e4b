"""The environment `telecom`: the service desk of a phone company, with plans, faults and visits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from unstale.envs.desk import desk_spec
from unstale.envs.desk.database import Desk, DeskError, User, numbered
from unstale.envs.desk.domain import Domain, Fact, Ignores, Request, Scenario, Step, Wish, refuse
from unstale.envs.desk.draw import DAYS, Draw
from unstale.envs.desk.tools import Toolbox

Status = Literal["active", "paused", "blocked"]
Contract = Literal["open", "fixed"]

PLANS = ("small", "medium", "large", "family", "student", "travel", "night", "office")
DEVICES = ("phone", "tablet", "watch", "router", "laptop", "modem")

POLICY = """You serve the desk of a phone company. Customers write to you; you look things up and \
change things with the tools.

Rules. If several apply, the first one decides.
1. {identify}
2. Look a line up before you decide anything about it. Ask the customer for what you do not know, \
and end each question with "?". Never invent a number.
3. Lines of business accounts: do nothing yourself; call hand_over for the line. Your work on it \
then ends.
4. A customer who wants to move the number to another company: hand_over.
5. Lines that are blocked because a bill is unpaid: refuse everything, reason "unpaid", except \
that a lost device can always be locked.
6. Lines that are paused: resume them if the customer wants that, or if the customer reports a \
fault, because the pause is the cause. A change of plan or of forwarding: refuse, reason "status".
7. Changing the plan: only lines with an "open" contract, otherwise refuse, reason "contract". \
List the options to find the number of the new one. If it is sold out: refuse, reason "sold_out".
8. Faults of active lines: book a visit of a technician. List the options to find the number of \
the day. More than two visits booked already: refuse, reason "limit".
9. Forwarding: set the number that the customer names. Lost devices: lock the device.

A refusal is made by calling refuse with the line and the reason, then telling the customer. When \
all is done, say so in one short sentence without a question."""

WISHES = {
    "plan": Wish(
        ("I want another plan.", "Please change my plan."),
        (
            "Hello, I pay too much for what I use. I'd like a different plan.",
            "Hi, could you move me to another tariff, please?",
            "My needs have changed, so I want to switch plans.",
        ),
    ),
    "lost": Wish(
        ("I lost a device.", "Please lock a device."),
        (
            "Help, somebody stole one of my devices! Can you lock it?",
            "Hello, I left one of my devices on the train. Please make sure nobody can use it.",
            "Hi. One of my devices is gone. I want it locked.",
        ),
    ),
    "fault": Wish(
        ("My line is dead.", "Nothing works here."),
        (
            "Hello, I have had no connection since yesterday.",
            "Hi there, calls and internet both fail at my place. Can somebody have a look?",
            "My connection is broken. Please fix it.",
        ),
    ),
    "resume": Wish(
        ("Please resume my line.", "I want my line back."),
        (
            "Hi, I'm back from my trip and would like to use my line again.",
            "Hello, please end the pause of my line.",
            "I paused a line some time ago. Could you switch it on again?",
        ),
    ),
    "forward": Wish(
        ("Please forward my calls.", "I want calls forwarded."),
        (
            "Hello, I'm away next week. Can my calls go to another number?",
            "Hi, I'd like my calls forwarded, please.",
            "Could you send the calls of a line of mine somewhere else?",
        ),
    ),
    "leave": Wish(
        ("I want to leave you.", "Please move my number away."),
        (
            "Hi, I found another company and want to take my number with me.",
            "Hello, please release my number. I'm going to another provider.",
            "I'm leaving you. How do I keep my number?",
        ),
    ),
}

FACTS = {
    "line": Fact(
        "Which line?",
        (),
        ("Line {}.", "It is {}."),
        ("The line number is {}.", "On my bill it says {}.", "It's {}, as far as I know."),
    ),
    "device": Fact(
        "Which device?",
        ("device", "which one", "which of"),
        ("The {}.", "My {}."),
        ("It's the {}.", "I mean my {}.", "The {}. I still have the others."),
    ),
    "plan": Fact(
        "Which plan?",
        ("plan", "tariff"),
        ("The {} one.", "Take {}."),
        ("I'd like the {} one.", "I saw {} in your list.", "{} sounds right for me."),
    ),
    "day": Fact(
        "Which day?",
        ("day", "date", "visit", "when"),
        ("On {}.", "{}, please."),
        ("{} would be good.", "I'm at home on {}.", "Could somebody come on {}?"),
    ),
    "target": Fact(
        "Forward to what?",
        ("forward", "forwarded", "forwarding", "calls", "where to"),
        ("To {}.", "Number {}."),
        ("To {}, please.", "My sister's number is {}.", "Could they go to {}?"),
    ),
}


@dataclass(frozen=True, slots=True)
class Plan:
    id: str
    name: str
    sold_out: bool


@dataclass(frozen=True, slots=True)
class Device:
    id: str
    name: str
    locked: bool = False


@dataclass(frozen=True, slots=True)
class Visit:
    """A day on which a technician is free for a visit."""

    id: str
    day: str


@dataclass(frozen=True, slots=True)
class Line:
    id: str
    user: str
    status: Status
    contract: Contract
    plan: str
    devices: tuple[Device, ...]
    target: str
    """The number to which calls are forwarded."""
    visits: int = 0
    """Number of visits that were booked before the episode began."""
    visit: str = ""
    """Number of the visit that was booked in this episode. Empty if there is none."""


def other_plans(desk: Desk, line: Line) -> list[Plan]:
    return [plan for plan in desk[Plan].values() if plan.id != line.plan]


def get_line(desk: Desk, line_id: str) -> Mapping[str, Any]:
    """Look up a line: account, status, contract, plan, devices, booked visits, forwarding."""
    line = desk.get(Line, line_id)
    record: dict[str, Any] = {
        "account": desk[User][line.user].account,
        "status": line.status,
        "contract": line.contract,
        "plan": desk[Plan][line.plan].name,
        "devices": [{"device_id": int(each.id), "name": each.name} for each in line.devices],
        "target_id": int(line.target),
    }
    return record if desk.terse else {**record, "visits_booked": line.visits}


def list_options(desk: Desk, line_id: str) -> Mapping[str, Any]:
    """List the other plans and the days of a technician's visit, with their numbers."""
    plans = other_plans(desk, desk.get(Line, line_id))
    rows = [
        {"plan_id": int(each.id), "name": each.name, "sold_out": each.sold_out} for each in plans
    ]
    visits = [{"visit_id": int(each.id), "day": each.day} for each in desk[Visit].values()]
    return {"plans": rows, "visits": visits}


def change_plan(desk: Desk, line_id: str, plan_id: str) -> str:
    """Give a line another plan."""
    line = desk.get(Line, line_id)
    if plan_id not in {plan.id for plan in other_plans(desk, line)}:
        raise DeskError(f"no other plan {plan_id}")
    desk.put(replace(line, plan=plan_id))
    return "ok"


def lock_device(desk: Desk, line_id: str, device_id: str) -> str:
    """Lock a device, so that nobody can use it."""
    line = desk.get(Line, line_id)
    if device_id not in {device.id for device in line.devices if not device.locked}:
        raise DeskError(f"no device {device_id} to lock in line {line_id}")
    devices = (
        replace(device, locked=device.locked or device.id == device_id) for device in line.devices
    )
    desk.put(replace(line, devices=tuple(devices)))
    return "ok"


def book_visit(desk: Desk, line_id: str, visit_id: str) -> str:
    """Book a visit of a technician for a line."""
    line = desk.get(Line, line_id)
    desk.put(replace(line, visit=desk.get(Visit, visit_id).id))
    return "ok"


def resume_line(desk: Desk, line_id: str) -> str:
    """Resume a line that is paused."""
    line = desk.get(Line, line_id)
    if line.status == "active":
        raise DeskError(f"line {line_id} is active")
    desk.put(replace(line, status="active"))
    return "ok"


def forward_calls(desk: Desk, line_id: str, target_id: str) -> str:
    """Forward the calls of a line to another number."""
    target = numbered(target_id, "number")
    desk.put(replace(desk.get(Line, line_id), target=target))
    return "ok"


def add_plans(draw: Draw) -> None:
    """Add five plans, and four days on which a technician is free."""
    for name in draw.random.sample(PLANS, 5):
        sold_out = draw.level > 1 and draw.random.random() < 0.2
        draw.desk.put(Plan(draw.number(), name, sold_out))
    for day in draw.random.sample(DAYS, 4):
        draw.desk.put(Visit(draw.number(), day))


def draw_line(draw: Draw, user: User) -> Line:
    """Return a random line with three devices."""
    random = draw.random
    names = random.sample(DEVICES, 3)
    devices = tuple(Device(draw.number(), name) for name in names)
    status: Status = random.choice(("active", "paused", "blocked"))
    contract: Contract = random.choice(("open", "fixed"))
    plan = random.choice(list(draw.desk[Plan]))
    visits = random.randrange(3)
    return Line(
        draw.number(), user.id, status, contract, plan, devices, draw.number(), visits=visits
    )


KINDS = {
    "plan": 0.24,
    "lost": 0.18,
    "fault": 0.19,
    "fault_paused": 0.05,
    "resume": 0.06,
    "forward": 0.09,
    "refuse_status": 0.05,
    "refuse_rule": 0.05,
    "business": 0.06,
    "leave": 0.03,
}
"""Share of each kind of request. `fault_paused` is a fault whose cause is the pause of the line.
`refuse_status` is a line that is blocked or paused. In `refuse_rule` a rule forbids the wish: a
fixed contract; from level 2 on also a plan that is sold out, or too many visits.
"""


def draw_request(draw: Draw, kind: str, user: User) -> Request:
    """Return a request of the given kind. Add the line that it is about to the database."""
    random, plans = draw.random, draw.desk[Plan]
    causes = ("contract", "sold_out", "limit") if draw.level > 1 else ("contract",)
    cause = random.choice(causes) if kind == "refuse_rule" else ""
    line = draw_line(draw, user)
    wish = kind.partition("_")[0]
    status: Status = "active"
    if kind == "refuse_status":
        wish, status = random.choice(
            (("plan", "paused"), ("forward", "paused"), ("resume", "blocked"), ("plan", "blocked"))
        )
    elif kind == "refuse_rule":
        wish = "fault" if cause == "limit" else "plan"
    elif kind == "business":
        wish = random.choice(("plan", "lost", "fault", "forward"))
    elif kind in ("fault_paused", "resume"):
        status = "paused"
    elif kind == "lost":
        status = random.choice(("active", "paused", "blocked"))
    contract = "fixed" if cause == "contract" else "open" if wish == "plan" else line.contract
    visits = random.randrange(3, 6) if cause == "limit" else line.visits
    line = replace(line, status=status, contract=contract, visits=visits)
    draw.desk.put(line)
    plan = random.choice(other_plans(draw.desk, line))
    plans[plan.id] = replace(plan, sold_out=cause == "sold_out")
    device, visit = random.choice(line.devices), random.choice(list(draw.desk[Visit].values()))
    target = draw.number()
    wants = {"device": device.id, "plan": plan.id, "visit": visit.id, "target": target}
    known = {
        "plan": {"plan": plan.name},
        "lost": {"device": device.name},
        "fault": {"day": visit.day},
        "forward": {"target": target},
    }.get(wish, {})
    return Request(kind, wish, line.id, wants, known)


def decide(scenario: Scenario, request: Request, ignores: Ignores) -> list[Step]:
    """Return the steps that a scripted expert takes to serve a request.

    `ignores` returns True for rules that the expert ignores. If it ignores `device`, `plan` or
    `visit`, the expert takes the first of a list instead of the one that the customer means. If it
    ignores `target`, it takes the present number, and if it ignores `leave`, it books a visit. If
    it ignores another rule, it does not look at the state or the contract of the line.
    """
    desk, wish = scenario.desk, request.wish
    line = desk[Line][request.case]
    if wish == "leave" and not ignores("leave"):
        return [("hand_over", {})]
    if wish == "lost":
        device = line.devices[0].id if ignores("device") else request.wants["device"]
        return ["device", ("lock_device", {"device_id": device})]
    if line.status == "blocked" and not ignores("unpaid"):
        return [refuse("unpaid")]
    if wish == "resume":
        return [("resume_line", {})]
    if line.status == "paused" and not ignores("status"):
        return [("resume_line", {}) if wish == "fault" else refuse("status")]
    if wish == "forward":
        target = line.target if ignores("target") else request.wants["target"]
        return ["target", ("forward_calls", {"target_id": target})]
    if wish == "plan":
        return _change_plan(scenario, request, line, ignores)
    if line.visits > 2:
        return [refuse("limit")]
    visit = next(iter(desk[Visit])) if ignores("visit") else request.wants["visit"]
    return [("list_options", {}), "day", ("book_visit", {"visit_id": visit})]


def _change_plan(scenario: Scenario, request: Request, line: Line, ignores: Ignores) -> list[Step]:
    if line.contract == "fixed" and not ignores("contract"):
        return [refuse("contract")]
    chosen = request.wants["plan"]
    if ignores("plan"):
        chosen = other_plans(scenario.desk, line)[0].id
    call = ("change_plan", {"plan_id": chosen})
    sold_out = scenario.desk[Plan][chosen].sold_out
    return [("list_options", {}), "plan", refuse("sold_out") if sold_out else call]


TELECOM = Domain(
    name="telecom",
    case=Line,
    tools=Toolbox(
        Line,
        reads=(get_line, list_options),
        writes=(change_plan, lock_device, book_visit, resume_line, forward_calls),
        reasons=("status", "unpaid", "contract", "sold_out", "limit"),
        meanings={
            "plan_id": "Number of the new plan.",
            "device_id": "Number of the device.",
            "visit_id": "Number of the technician's visit.",
            "target_id": "Number to which calls are forwarded.",
        },
    ),
    kinds=KINDS,
    handed_over=("leave",),
    wishes=WISHES,
    facts=FACTS,
    brief="Keep the rules of the phone company.",
    policy=POLICY,
    add_stock=add_plans,
    draw_case=draw_line,
    draw_request=draw_request,
    decide=decide,
    faults=("status", "unpaid", "contract", "leave", "device", "plan", "visit", "target"),
)

ENV = desk_spec(TELECOM)
