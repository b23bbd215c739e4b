"""The tools of a customer-service desk, which read and change its database.

A call fails if its arguments do not exist or do not belong together. A call that breaks a rule
succeeds, but leads to a wrong database, so the reward is 0.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from unstale.envs import tool_schema
from unstale.envs.desk.database import Desk, DeskError, Record, User

Run = Callable[..., str | Mapping[str, Any]]
"""A function `(database, **arguments)` that carries out a tool call. All arguments are text. It
returns the result as text or as a record, and raises `DeskError` if the call is not possible.
"""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. Those of its `arguments` whose names end in `_id` are integers."""

    name: str
    purpose: str
    arguments: tuple[str, ...]
    run: Run
    writes: bool
    """True if a call changes the database."""


class Toolbox:
    """The tools of a desk.

    `case` is the type of record that requests are about. Each function in `reads` and `writes` is a
    tool, which the policy sees with the function's docstring. An argument of `Literal` type allows
    these words only. `meanings` is name of an argument -> its description. The tools `find_user`,
    `refuse`, with one of the `reasons`, and `hand_over` are added.
    """

    def __init__(
        self,
        case: type[Record],
        *,
        reads: Sequence[Run],
        writes: Sequence[Run],
        reasons: Sequence[str],
        meanings: Mapping[str, str],
    ) -> None:
        self._case = case
        name = case.__name__.lower()
        a_case = f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
        self.case_name = name
        self.case_id = f"{name}_id"
        self._meanings = {
            "email": "The customer's email address.",
            self.case_id: f"Number of the {name}.",
            "reason": "The rule the refusal rests on.",
            **meanings,
        }
        self.choices = {"reason": tuple(reasons)}
        """Name of an argument -> words that it may have."""
        for run in writes:
            for key, hint in get_type_hints(run).items():
                if get_origin(hint) is Literal:
                    self.choices[key] = get_args(hint)
        find_user = Tool(
            "find_user",
            "Find a customer by email address; gives the account and the numbers of the "
            f"customer's {name}s.",
            ("email",),
            self._find_user,
            writes=False,
        )
        refuse = Tool(
            "refuse",
            f"Note that a request about {a_case} is refused, and why.",
            (self.case_id, "reason"),
            self._refuse,
            writes=True,
        )
        hand_over = Tool(
            "hand_over",
            f"Hand {a_case}'s case over to a human colleague.",
            (self.case_id,),
            self._hand_over,
            writes=True,
        )
        own = [_tool(run, writes=run in writes) for run in (*reads, *writes)]
        self.tools = {tool.name: tool for tool in (find_user, *own, refuse, hand_over)}

    def call(self, desk: Desk, name: str, arguments: Mapping[str, Any]) -> str:
        """Carry out a tool call and return its result. Raises `DeskError` if it is not possible."""
        if name not in self.tools:
            raise unknown_tool(name, self.tools)
        tool = self.tools[name]
        if set(arguments) != set(tool.arguments):
            raise DeskError(
                f"{name} takes {', '.join(tool.arguments)}; got "
                f"{', '.join(map(str, arguments)) or 'nothing'}"
            )
        values = {key: _read(key, value) for key, value in arguments.items()}
        for key in self.choices.keys() & values.keys():
            if values[key] not in self.choices[key]:
                raise DeskError(f"{key} must be one of {', '.join(self.choices[key])}")
        answer = tool.run(desk, **values)
        if tool.writes:
            desk.writes.append(name)
        return answer if isinstance(answer, str) else desk.text(answer)

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the schema of a tool, in the format that chat templates expect."""
        properties: dict[str, Any] = {}
        for key in self.tools[name].arguments:
            kind = "integer" if key.endswith("_id") else "string"
            properties[key] = {"type": kind, "description": self._meanings[key]}
            if key in self.choices:
                properties[key]["enum"] = list(self.choices[key])
        return tool_schema(name, self.tools[name].purpose, properties)

    def _find_user(self, desk: Desk, email: str) -> str | Mapping[str, Any]:
        for user in desk[User].values():
            if user.email == email.strip().lower():
                break
        else:
            raise DeskError(f"no user with email {email}")
        cases: Mapping[str, Any] = desk[self._case]
        numbers = [number for number, case in cases.items() if case.user == user.id]
        if desk.terse:
            return f"{user.account}; {self.case_name}s: " + ", ".join(numbers)
        return {
            "name": user.name,
            "account": user.account,
            f"{self.case_name}s": [int(number) for number in numbers],
        }

    def _refuse(self, desk: Desk, reason: str, **case: str) -> str:
        note = desk.note(self._known(desk, case))
        desk.put(replace(note, refused=tuple(sorted({*note.refused, reason}))))
        return "noted"

    def _hand_over(self, desk: Desk, **case: str) -> str:
        desk.put(replace(desk.note(self._known(desk, case)), handed_over=True))
        return "a colleague takes over"

    def _known(self, desk: Desk, case: Mapping[str, str]) -> str:
        """Return the number in `case`. Raises `DeskError` if no case has it."""
        return desk.get(self._case, case[self.case_id]).id


def unknown_tool(name: str, tools: Iterable[str]) -> DeskError:
    """Return the error for a call of an unknown tool. It lists the known ones."""
    return DeskError(f"unknown tool {name!r}; tools are {', '.join(tools)}")


def _tool(run: Run, *, writes: bool) -> Tool:
    arguments = tuple(inspect.signature(run).parameters)[1:]
    return Tool(run.__name__, inspect.getdoc(run) or "", arguments, run, writes)


def _read(key: str, value: Any) -> str:
    """Return an argument as text. A number may be an integer or a text. Raises `DeskError`
    otherwise.
    """
    is_number = key.endswith("_id")
    if isinstance(value, str) or (is_number and type(value) is int):
        return str(value)
    raise DeskError(f"{key} must be {'an integer' if is_number else 'a string'}")
