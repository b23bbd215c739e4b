"""Skills that the policy writes after a task: notes, and procedures that it can call (SAGE).

A note is a text. A procedure has parameters and a list of calls of the environment's tools, in
which the text `$name` stands for the parameter `name`. The policy calls it like a tool. The
environment then executes its calls in order, and its result has all their results.

A library is a file with skills, which tasks read at their start (`task.skills`).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unstale.config import ConfigError
from unstale.durability.run_folder import write_whole
from unstale.envs import EnvError, Message, ToolCall

MAX_CALLS = 8
"""Largest number of calls of a procedure. It keeps a reply's tool calls few."""
MAX_LINE = 2000
"""Largest number of characters of a skill as text. It is in the prompt of each later task."""
SKILLS = "Skills from earlier tasks:"
END = "End of the skills."
_SKILL = re.compile(r"SKILL\s+(\w+)\s*(?:\(([^()\n]*)\))?\s*:[ \t]*")
_CALL = '[{"name": "TOOL", "arguments": {"ARGUMENT": "$PARAMETER"}}]'


class SkillError(Exception):
    """Error: a skill, or a call of one, is wrong. The policy reads the text."""


@dataclass(frozen=True, slots=True)
class Skill:
    """A note, or a procedure if it has calls."""

    name: str
    text: str = ""
    """The text of a note. Empty for a procedure."""
    parameters: tuple[str, ...] = ()
    calls: tuple[ToolCall, ...] = ()

    @property
    def line(self) -> str:
        """The skill as the policy writes it, without the word SKILL."""
        if not self.calls:
            return f"{self.name}: {self.text}"
        calls = json.dumps(_rows(self.calls), ensure_ascii=False)
        return f"{self.name}({', '.join(self.parameters)}): {calls}"

    @property
    def tools(self) -> frozenset[str]:
        """The names of the tools that a procedure calls. Empty for a note."""
        return frozenset(call.name for call in self.calls)

    def is_named(self, text: str) -> bool:
        return re.search(rf"\b{self.name}\b", text) is not None

    def schema(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the schema of the procedure as a tool. Its parameters have the schemas of the
        arguments of `tools` for which they stand.
        """
        known = _by_name(tools)
        properties: dict[str, Any] = {name: {} for name in self.parameters}
        for call in reversed(self.calls):
            of_tool = known[call.name].get("parameters", {}).get("properties", {})
            for argument, value in call.arguments.items():
                if (name := _placeholder(value)) in properties:
                    properties[name] = of_tool.get(argument, {})
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        does = f"Your skill. Calls {', '.join(call.name for call in self.calls)}."
        function = {"name": self.name, "description": does, "parameters": schema}
        return {"type": "function", "function": function}

    def expand(self, call: ToolCall) -> tuple[ToolCall, ...]:
        """Return the calls of the environment's tools for a call of the procedure.

        Raises `SkillError` if the call is malformed or has other arguments than the parameters.
        """
        if call.error:
            raise SkillError(call.error)
        if set(call.arguments) != set(self.parameters):
            takes, got = (
                ", ".join(each) or "nothing" for each in (self.parameters, call.arguments)
            )
            raise SkillError(f"the skill {self.name} takes {takes}; got {got}")
        return tuple(
            ToolCall(each.name, _filled(each.arguments, call.arguments)) for each in self.calls
        )


def _filled(value: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a value in which each text `$name` is replaced by the argument `name`."""
    if isinstance(value, Mapping):
        return {key: _filled(each, arguments) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, arguments) for each in value]
    name = _placeholder(value)
    return arguments.get(name, value)


def _placeholder(value: Any) -> str:
    """Return the name in a text `$name`. Empty for any other value."""
    is_one = isinstance(value, str) and value[:1] == "$" and value[1:].isidentifier()
    return value[1:] if is_one else ""


def _placeholders(value: Any) -> list[str]:
    if isinstance(value, Mapping | list):
        inner = value.values() if isinstance(value, Mapping) else value
        return [name for each in inner for name in _placeholders(each)]
    return [name] if (name := _placeholder(value)) else []


def read_skills(
    text: str, tools: Sequence[Mapping[str, Any]], known: Iterable[str] = ()
) -> dict[str, Skill]:
    """Return the skills in a reply by name: `SKILL name: text` or `SKILL name(parameters): calls`.

    `tools` has the schemas of the tools that a procedure may call, and `known` the names of earlier
    skills. Raises `SkillError`, with one sentence, for the first skill that is wrong.
    """
    found: dict[str, Skill] = {}
    for match in _SKILL.finditer(text):
        skill = _read(match, text)
        if not skill.text and not skill.calls:
            continue
        check_skill(skill, tools, {*known, *found})
        found[skill.name] = skill
    return found


def _read(match: re.Match[str], text: str) -> Skill:
    """Return the skill that begins with a match of `_SKILL` in a text."""
    name, listed = match[1], match[2]
    rest = text[match.end() :]
    if listed is None:
        return Skill(name, rest.partition("\n")[0].strip())
    parameters = tuple(filter(None, (each.strip() for each in listed.split(","))))
    wrong = f"the calls of the skill {name} must be a JSON list such as {_CALL}"
    try:
        rows, _ = json.JSONDecoder().raw_decode(rest.lstrip())
    except (ValueError, RecursionError) as error:
        raise SkillError(f"{wrong}: {error}") from None
    return Skill(name, "", parameters, _read_calls(rows, wrong))


def list_skills(skills: Iterable[Skill]) -> str:
    """Return the text by which a prompt lists skills. Empty without skills."""
    lines = [each.line for each in skills]
    return "\n".join([SKILLS, *lines, END]) if lines else ""


def read_list(text: str) -> tuple[Skill, ...]:
    """Return the skills that a prompt lists. Lines that are no skills are left out."""
    listed = text.rpartition(SKILLS)[2].partition(END)[0] if SKILLS in text else ""
    found = []
    for line in listed.splitlines():
        if match := _SKILL.match(f"SKILL {line}"):
            with suppress(SkillError):
                found.append(_read(match, f"SKILL {line}"))
    return tuple(found)


def _read_calls(rows: Any, wrong: str) -> tuple[ToolCall, ...]:
    """Return the calls in a JSON list. Raises `SkillError` with the text `wrong` for another
    value.
    """
    if not isinstance(rows, list) or not rows:
        raise SkillError(wrong)
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise SkillError(wrong)
        if not isinstance(row.get("arguments", {}), dict):
            raise SkillError(wrong)
    return tuple(ToolCall(row["name"], row.get("arguments", {})) for row in rows)


def check_skill(
    skill: Skill, tools: Sequence[Mapping[str, Any]], names: Iterable[str] = ()
) -> None:
    """Raise `SkillError`, with one sentence, if a skill is wrong.

    `tools` has the schemas of the tools that a procedure may call, and `names` the names of all
    skills.
    """
    known = _by_name(tools)
    if len(skill.line) > MAX_LINE:
        size = f"{len(skill.line):,} characters; at most {MAX_LINE:,}"
        raise SkillError(f"the skill {skill.name} has {size} are allowed")
    if skill.name in known:
        raise SkillError(f"the skill {skill.name} has the name of a tool: choose another name")
    if len(skill.calls) > MAX_CALLS:
        size = f"{len(skill.calls)} calls; at most {MAX_CALLS}"
        raise SkillError(f"the skill {skill.name} has {size} are allowed")
    for call in skill.calls:
        if call.name not in known:
            kind = "skill" if call.name in {*names, skill.name} else "unknown tool"
            tools_text = ", ".join(known) or "none"
            raise SkillError(
                f"the skill {skill.name} calls the {kind} {call.name}: it may only call the tools, "
                f"which are {tools_text}"
            )
        _check_arguments(skill.name, call, known[call.name].get("parameters", {}))
    used = [name for call in skill.calls for name in _placeholders(call.arguments)]
    if undeclared := [name for name in used if name not in skill.parameters]:
        raise SkillError(
            f"the skill {skill.name} uses ${undeclared[0]}, which is not in its parameters "
            f"({', '.join(skill.parameters)})"
        )
    unused = [name for name in skill.parameters if name not in used]
    if unused or len({*skill.parameters}) < len(skill.parameters):
        raise SkillError(
            f"the parameters of the skill {skill.name} must be different names that its calls use "
            f"as $name, got {', '.join(skill.parameters)}"
        )


def _check_arguments(name: str, call: ToolCall, schema: Mapping[str, Any]) -> None:
    """Raise `SkillError` if a call lacks an argument of the tool, or has one too many."""
    for argument in schema.get("required", ()):
        if argument not in call.arguments:
            raise SkillError(f"the skill {name} calls {call.name} without {argument}")
    properties = schema.get("properties")
    for argument in call.arguments if properties else ():
        if argument not in (properties or {}):
            takes = ", ".join(properties or {})
            raise SkillError(
                f"the skill {name} calls {call.name} with {argument}; the tool takes {takes}"
            )


def _by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {tool["function"]["name"]: tool["function"] for tool in tools}


def usable(skills: Iterable[Skill], tools: Sequence[Mapping[str, Any]]) -> dict[str, Skill]:
    """Return the skills by name whose calls are possible with these tools. A skill with the name of
    one of the tools is left out.
    """
    known = _by_name(tools)
    return {
        each.name: each for each in skills if each.tools <= known.keys() and each.name not in known
    }


def with_skills(
    tools: Sequence[Mapping[str, Any]], skills: Iterable[Skill]
) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of tools, and of the procedures among the skills that they allow."""
    found = [each for each in usable(skills, tools).values() if each.calls]
    return (*tools, *(each.schema(tools) for each in found))


class ExpandedReply:
    """A reply in which calls of procedures are replaced by their calls of the environment's tools.

    `reply` is for the environment. It has no calls if every call was a wrong call of a procedure.
    `used` has the names of the procedures that were called, and of the notes that were named.
    """

    def __init__(self, reply: Message, skills: Mapping[str, Skill]) -> None:
        self._parts: list[tuple[ToolCall, tuple[ToolCall, ...], str]] = []
        """For each call: the call, the environment's calls for it, and an error, empty without."""
        self.called: list[str] = []
        self.num_wrong = 0
        """Number of calls of procedures with wrong arguments."""
        for call in reply.tool_calls:
            skill = skills.get(call.name)
            if skill is None or not skill.calls:
                self._parts.append((call, (call,), ""))
                continue
            try:
                self._parts.append((call, skill.expand(call), ""))
                self.called.append(call.name)
            except SkillError as error:
                self._parts.append((call, (), f"Error: {error}"))
                self.num_wrong += 1
        calls = tuple(each for _, calls, _ in self._parts for each in calls)
        self.reply = replace(reply, tool_calls=calls)
        self.changed = self.reply.tool_calls != reply.tool_calls
        said = " ".join([reply.content, *map(str, reply.tool_calls)])
        notes = [name for name, each in skills.items() if not each.calls and each.is_named(said)]
        self.used = {*self.called, *notes}

    def answers(self, messages: Sequence[Message], *, done: bool = False) -> tuple[Message, ...]:
        """Return the environment's answer with one result for each call of the policy.

        `messages` are its answer to `reply`. After the last turn (`done`) they may lack the
        results. Raises `EnvError` if they do not have one message of role "tool" for each call.
        """
        if not self.changed:
            return tuple(messages)
        results = [each for each in messages if each.role == "tool"]
        others = tuple(each for each in messages if each.role != "tool")
        num_calls = len(self.reply.tool_calls)
        if done and not results:
            return others
        if len(results) != num_calls or any(each.images for each in results):
            raise EnvError(
                f"skills need one result, without pictures, for each tool call: {num_calls} calls "
                f"were answered with {len(results)} messages of role tool"
            )
        left = iter(results)
        folded = []
        for call, calls, error in self._parts:
            if calls == (call,):
                folded.append(next(left))
                continue
            lines = [f"{each.name}: {next(left).content}" for each in calls]
            folded.append(Message("tool", error or "\n".join(lines)))
        return (*folded, *others)


def _rows(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]


def skill_row(skill: Skill) -> dict[str, Any]:
    """Return a skill as a row of a library."""
    if not skill.calls:
        return {"name": skill.name, "text": skill.text}
    return {
        "name": skill.name,
        "parameters": list(skill.parameters),
        "calls": _rows(skill.calls),
    }


def write_library(path: Path, skills: Iterable[tuple[Skill, int]]) -> None:
    """Write a library in one step: skills, and in how many solved tasks each was used."""
    rows = [{**skill_row(skill), "successes": count} for skill, count in skills]
    text = json.dumps({"skills": rows}, ensure_ascii=False, indent=1) + "\n"
    write_whole(path, text, durable=True)


def read_library(path: str, tools: Sequence[Mapping[str, Any]]) -> tuple[Skill, ...]:
    """Return the skills of a library. Raises `ConfigError` if it cannot be read, or if one of them
    is wrong for these tools.
    """
    problem = f"task.skills {path}"
    try:
        rows = json.loads(Path(path).read_text("utf-8"))["skills"]
        skills = tuple(_read_row(row) for row in rows)
    except OSError as error:
        raise ConfigError(f"{problem} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError, SkillError) as error:
        raise ConfigError(
            f"{problem} is not a library that `unstale skills` has written ({error})"
        ) from None
    names = [each.name for each in skills]
    for each in skills:
        try:
            check_skill(each, tools, names)
        except SkillError as error:
            raise ConfigError(f"{problem}: {error}") from None
    if len({*names}) < len(names):
        raise ConfigError(f"{problem}: the skills must have different names")
    return skills


def _read_row(row: Any) -> Skill:
    name, text = row["name"], row.get("text", "")
    if not (isinstance(name, str) and isinstance(text, str) and re.fullmatch(r"\w+", name)):
        raise ValueError(f"a skill has the name {name!r} and the text {text!r}")
    if "calls" not in row:
        return Skill(name, text)
    listed = row.get("parameters", [])
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise ValueError(f"the parameters of {name} must be a list of names, got {listed!r}")
    parameters = tuple(listed)
    return Skill(name, "", parameters, _read_calls(row["calls"], f"the calls of {name} are wrong"))
