"""The declaration of a customer-service desk: its records, tools, rules, requests and wordings."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from unstale.envs.desk.database import Desk, Record, User
from unstale.envs.desk.draw import Draw
from unstale.envs.desk.tools import Toolbox

LEVELS = (1, 2, 3)
"""Levels of difficulty. At 1, texts are short and there is one request. At 2, customers speak
freely, records are JSON, and the system prompt has all rules. 3 is like 2, but some customers have
a second request, and the policy must first identify the customer: until it calls `find_user` with
the customer's email, other calls are errors (except with `Domain.earlier_replies`).
"""

Call = tuple[str, dict[str, str]]
"""A tool call: (name, arguments)."""
Step = str | Call
"""One step of the scripted expert: a tool call, or the kind of fact that it asks the customer
for.
"""
Ignores = Callable[[str], bool]
"""A function of a rule's name that returns True if the expert breaks this rule."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A kind of fact that a customer may be asked for."""

    question: str
    """The scripted expert's question for the fact."""
    heard: tuple[str, ...]
    """Words, also in the plural, that make a question one about this fact. For the number of the
    case, such words are built in.
    """
    terse: tuple[str, ...]
    """The customer's answers at level 1. One is drawn, and `{}` is replaced by the fact."""
    free: tuple[str, ...]
    """The customer's answers at levels 2 and 3, in freer words. One is drawn, and `{}` is replaced
    by the fact.
    """


@dataclass(frozen=True, slots=True)
class Wish:
    """Wordings of a request at level 1 (`terse`) and above (`free`). The customer uses a random
    one.
    """

    terse: tuple[str, ...]
    free: tuple[str, ...]


EMAIL = Fact(
    "Your email?",
    ("email", "e-mail", "mail address"),
    ("{}",),
    ("My email is {}.", "Sure, it's {}", "You have me as {}, I think."),
)


REFUND_TO = Fact(
    "Refund to what?",
    ("refund to", "payment", "refunded to", "refund go", "money back to"),
    ("To my {}.", "My {}."),
    ("Please put it on my {}.", "I'd rather have it on the {}.", "My {}, if that's possible."),
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the customer."""

    kind: str
    wish: str
    case: str
    """Number of the case: the record that the request is about."""
    wants: Mapping[str, str] = field(default_factory=dict)
    """Name -> value that the customer means, such as the number of an item."""
    known: Mapping[str, str] = field(default_factory=dict)
    """Kind of a fact -> what the customer answers when asked for it."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One task: the customer, the requests and the database `desk` at the start of an episode."""

    domain: "Domain"
    level: int
    desk: Desk
    user: User
    requests: tuple[Request, ...]
    seed: int

    def known_facts(self, request: Request) -> dict[str, str]:
        """Return kind of a fact -> what the customer answers, for all facts about this request."""
        facts = {"email": self.user.email} if self.level > 2 else {}
        return {**facts, self.domain.tools.case_name: request.case, **request.known}


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The declaration of a customer-service desk.

    A case is the record that a request is about. `case` is its type.
    """

    name: str
    case: type[Record]
    tools: Toolbox
    """The desk's tools. `get_<case>` must be one of them and return the record of a case."""
    kinds: Mapping[str, float]
    """Kind of a request -> its share of all requests. A kind with the name of the special account
    (see `accounts`) means that the customer has this account, so that the case must be handed over.
    """
    handed_over: tuple[str, ...]
    """Kinds of requests whose case must be handed to a human, besides those of special accounts.
    Such a request comes last.
    """
    wishes: Mapping[str, Wish]
    facts: Mapping[str, Fact]
    """Kind of a fact -> the fact, in the order in which a question is compared with them."""
    brief: str
    """The system prompt at level 1. It is short, because a small base model has learnt the rules
    already.
    """
    policy: str
    """The system prompt at levels 2 and 3. It has the rules, and the placeholder `{identify}`."""
    add_stock: Callable[[Draw], None]
    """A function that adds records of no customer to the database, such as a shop's items."""
    draw_case: Callable[[Draw, User], Any]
    """A function that returns a random case of a user, without adding it to the database."""
    draw_request: Callable[[Draw, str, User], Request]
    """A function that returns a random request of this kind by this user, and adds its case to the
    database.
    """
    decide: Callable[[Scenario, Request, Ignores], list[Step]]
    """A function that returns the expert's steps after reading the case. The last step must be the
    call that the rules require. Arguments may leave out the case's number.
    """
    faults: Sequence[str]
    """Names of the rules that the expert can break in `decide`. The rule `account` is built in."""
    accounts: tuple[str, str] = ("personal", "business")
    """The usual and the special kind of account."""
    payments: Sequence[str] = ()
    """Kinds of payment methods. Each customer has the first one and one of the others. May be
    empty.
    """
    earlier_replies: bool = False
    """True for the behaviour of earlier releases: all tools may be called at every level and before
    the customer is identified, and words count even inside of other words.
    """

    def tool_names(self, level: int) -> tuple[str, ...]:
        return tuple(name for name in self.tools.tools if level > 2 or name != "find_user")

    def heard(self, kind: str, text: str) -> bool:
        """Return True if `text`, in lower case, is a question about this kind of fact."""
        words = EMAIL.heard if kind == "email" else self.facts[kind].heard
        if self.earlier_replies:
            return any(word in text for word in words)
        if kind == (name := self.tools.case_name):
            asked = (f"which {name}", f"what {name}", f"your {name}", f"number of the {name}")
            words = (*words, *asked, f"{name} number", f"{name} id", f"{name} reference")
        return re.search(rf"\b(?:{'|'.join(map(re.escape, words))})s?\b", text) is not None

    def prompt(self, level: int) -> str:
        if level == 1:
            return self.brief
        if level == 2:
            identify = "The customer is identified already. Ask for the "
            return self.policy.format(identify=f"{identify}{self.tools.case_name} number.")
        return self.policy.format(
            identify="Identify the customer first: ask for the email address and look it up with "
            "find_user."
        )

    def scenario(self, level: int, split: str, index: int) -> Scenario:
        """Return the scenario of a task, which follows from these arguments."""
        random = Random(f"{self.name}/{level}/{split}/{index}")
        draw = Draw(random, level)
        desk = draw.desk
        num_requests = 2 if level > 2 and random.random() < 0.4 else 1
        kinds = random.choices(list(self.kinds), weights=list(self.kinds.values()), k=num_requests)
        special = self.accounts[1]
        if special in kinds:
            kinds = [special]
        # A hand-over ends the episode, so it comes last.
        kinds.sort(key=self.handed_over.__contains__)
        draw.add_users(self.accounts, kinds == [special], self.payments)
        self.add_stock(draw)
        customer = next(iter(desk[User].values()))
        requests = tuple(self.draw_request(draw, kind, customer) for kind in kinds)
        for user in desk[User].values():
            desk.put(self.draw_case(draw, user))
        shuffled = list(desk[self.case].items())
        random.shuffle(shuffled)
        desk.tables[self.case] = dict(shuffled)
        return Scenario(self, level, desk, customer, requests, random.getrandbits(32))

    def steps(self, scenario: Scenario, request: Request, ignores: Ignores) -> list[Step]:
        """Return the steps that the expert takes once it has read the case: kinds of facts to ask
        for, and tool calls.

        `ignores` returns True for the rules that the expert breaks.
        """
        if scenario.user.account == self.accounts[1] and not ignores("account"):
            steps: list[Step] = [("hand_over", {})]
        else:
            steps = self.decide(scenario, request, ignores)
        return [step if isinstance(step, str) else self._whole(*step, request) for step in steps]

    def _whole(self, name: str, arguments: dict[str, str], request: Request) -> Call:
        number = {self.tools.case_id: request.case}
        takes_case = self.tools.case_id in self.tools.tools[name].arguments
        return name, {**number, **arguments} if takes_case else arguments


def refuse(reason: str) -> Call:
    """Return the tool call that refuses a request, for this reason."""
    return "refuse", {"reason": reason}
