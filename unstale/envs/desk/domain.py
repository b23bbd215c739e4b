"""The declaration of a customer-service desk: its records, tools, rules, requests and words."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from unstale.envs.desk.database import Desk, Record, User
from unstale.envs.desk.draw import Draw
from unstale.envs.desk.tools import Toolbox

LEVELS = (1, 2, 3)
"""Levels of difficulty. 1 has short lines and one request, for the demo. 2 has free wording, JSON
records and all rules, which are in the prompt. 3 is like 2, but some customers have a second
request, and the agent must identify the customer: other calls are errors until `find_user` was
called with the customer's email (`retail` does not check that).
"""

Call = tuple[str, dict[str, str]]
"""A tool call: its name and its arguments."""
Step = str | Call
"""One step of the scripted expert: a tool call, or a kind of fact that it asks the customer for."""
Ignores = Callable[[str], bool]
"""A function of a rule's name. It returns True if the expert does not follow the rule this time."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A kind of fact that the customer knows. In an answer, `{}` stands for the fact."""

    question: str
    """The question with which the scripted expert asks for the fact."""
    heard: tuple[str, ...]
    """Words by which the customer recognises a question about this fact, also as a plural.
    Questions for the number of the case need no words here.
    """
    terse: tuple[str, ...]
    """The customer's answers at level 1, of which one is drawn."""
    free: tuple[str, ...]
    """The customer's answers at the levels 2 and 3, in freer words, of which one is drawn."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The words with which a customer makes a kind of request."""

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
    """A request that a customer makes."""

    kind: str
    wish: str
    case: str
    """Number of the record that the request is about."""
    wants: Mapping[str, str] = field(default_factory=dict)
    """The values that the customer means, by name, such as the number of an item."""
    known: Mapping[str, str] = field(default_factory=dict)
    """The customer's answers in words, by kind of fact."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The facts of one task: the customer, the requests and the database.

    `desk` is the database at the start of an episode, which copies it.
    """

    domain: "Domain"
    level: int
    desk: Desk
    user: User
    requests: tuple[Request, ...]
    seed: int

    def known_facts(self, request: Request) -> dict[str, str]:
        """Return what the customer can answer about a request, by kind of fact."""
        facts = {"email": self.user.email} if self.level > 2 else {}
        return {**facts, self.domain.tools.case_name: request.case, **request.known}


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The declaration of a customer-service desk.

    A case is the record that a request is about, and `case` is its type.
    """

    name: str
    case: type[Record]
    tools: Toolbox
    """The tools of the desk. One of them is `get_<case>`, which returns the record of a case."""
    kinds: Mapping[str, float]
    """Share of each kind of request. A kind with the name of the special account is a request of a
    customer who has that account. The case of such a request must be handed over.
    """
    handed_over: tuple[str, ...]
    """Further kinds of requests whose case a human must take over, besides those of special
    accounts. Such a request is the customer's last.
    """
    wishes: Mapping[str, Wish]
    facts: Mapping[str, Fact]
    """The kinds of facts, in the order in which the customer tries to recognise a question."""
    brief: str
    """The system prompt at level 1. It is short, because a small base model already knows the
    rules.
    """
    policy: str
    """The system prompt at the levels 2 and 3, with the rules and the placeholder `{identify}`."""
    add_stock: Callable[[Draw], None]
    """A function that adds the records that belong to no customer, such as the items of a shop."""
    draw_case: Callable[[Draw, User], Any]
    """A function that returns a random case of a user, which is not in the database yet."""
    draw_request: Callable[[Draw, str, User], Request]
    """A function that returns a random request of a kind. It adds a case that fits it to the
    database.
    """
    decide: Callable[[Scenario, Request, Ignores], list[Step]]
    """A function that returns the expert's steps after it has read the case. The last step is the
    call that the rules require. The number of the case may be left out of arguments.
    """
    faults: Sequence[str]
    """Names of the rules that `decide` can ignore, in addition to `account`."""
    accounts: tuple[str, str] = ("personal", "business")
    """The usual kind of account, and the special kind."""
    payments: Sequence[str] = ()
    """Payment methods, if customers have any. Each customer has the first and one of the others."""
    earlier_replies: bool = False
    """True for the behaviour of earlier releases: every tool can be called at every level, also
    before the customer is identified, and the customer recognises words inside of other words.
    """

    def tool_names(self, level: int) -> tuple[str, ...]:
        """Return the names of the tools of a level."""
        return tuple(name for name in self.tools.tools if level > 2 or name != "find_user")

    def heard(self, kind: str, text: str) -> bool:
        """Return True if the customer recognises `text` as a question about this kind of fact.

        `text` is in lower case.
        """
        words = EMAIL.heard if kind == "email" else self.facts[kind].heard
        if self.earlier_replies:
            return any(word in text for word in words)
        if kind == (name := self.tools.case_name):
            asked = (f"which {name}", f"what {name}", f"your {name}", f"number of the {name}")
            words = (*words, *asked, f"{name} number", f"{name} id", f"{name} reference")
        return re.search(rf"\b(?:{'|'.join(map(re.escape, words))})s?\b", text) is not None

    def prompt(self, level: int) -> str:
        """Return the system prompt of a level."""
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
        """Return the scenario of a task, which depends only on the arguments."""
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
        """Return the expert's steps after it has read the case.

        The steps are texts and tool calls with all their arguments. `ignores` decides which rules
        the expert does not follow.
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
    """Return the tool call that refuses a request for this reason."""
    return "refuse", {"reason": reason}
