"""A scripted expert that serves a customer by the rules, or breaks some of them."""

from collections.abc import Mapping
from random import Random
from types import MappingProxyType

from unstale.envs import Message, ToolCall
from unstale.envs.desk.database import Desk
from unstale.envs.desk.domain import EMAIL, Call, Request, Scenario, Step

NO_FAULTS: Mapping[str, float] = MappingProxyType({})


def expert_replies(
    scenario: Scenario, faults: Mapping[str, float] = NO_FAULTS, seed: int = 0
) -> list[Message]:
    """Return the expert's replies of one episode. They succeed if the expert breaks no rule.

    `faults` is name of a rule -> probability that the expert breaks it. The rules are `account` and
    `Domain.faults`. Breaking one leads to a wrong decision, never to a malformed call. Raises
    `ValueError` for an unknown rule.
    """
    domain = scenario.domain
    rules = ("account", *domain.faults)
    if unknown := faults.keys() - set(rules):
        raise ValueError(
            f"{domain.name} has no rule {', '.join(sorted(unknown))}; rules are {', '.join(rules)}"
        )
    random = Random(f"{scenario.seed}/{seed}")

    def ignores(rule: str) -> bool:
        return random.random() < faults.get(rule, 0.0)

    steps: list[Step] = []
    if scenario.level > 2:
        steps += ["email", ("find_user", {"email": scenario.user.email})]
    replies = [_reply(scenario, step) for step in steps]
    name, number = domain.tools.case_name, domain.tools.case_id
    for request in scenario.requests:
        steps = [name, (f"get_{name}", {number: request.case})]
        steps += domain.steps(scenario, request, ignores)
        replies += [_reply(scenario, step) for step in steps]
        last_call = steps[-1][0]
        if last_call != "hand_over":
            replies.append(Message("assistant", "Sorry." if last_call == "refuse" else "Done."))
    return replies


def _reply(scenario: Scenario, step: Step) -> Message:
    if isinstance(step, str):
        fact = EMAIL if step == "email" else scenario.domain.facts[step]
        return Message("assistant", fact.question)
    name, arguments = step
    return call_message(name, **arguments)


def call_message(name: str, /, **arguments: str) -> Message:
    """Return a reply with one tool call, in which numbers are integers."""
    written = {
        key: int(value) if key.endswith("_id") else value for key, value in arguments.items()
    }
    return Message("assistant", "", (ToolCall(name, written),))


def correct_call(scenario: Scenario, request: Request) -> Call:
    """Return the tool call that the rules require as answer to a request."""
    call = scenario.domain.steps(scenario, request, lambda rule: False)[-1]
    assert isinstance(call, tuple)
    return call


def goal(scenario: Scenario) -> Desk:
    """Return the database in the state in which the rules require it at the end."""
    desk = scenario.desk.copy()
    for request in scenario.requests:
        name, arguments = correct_call(scenario, request)
        scenario.domain.tools.call(desk, name, arguments)
    return desk
