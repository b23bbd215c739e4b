"""A fake of VitaBench with its public interface, and of the logger that it uses.

It has one shop, which sells tea and never sells out. As in VitaBench, the goods of a task are
recorded by thread: another thread finds none. Calls that fail print a traceback, and importing it
prints to standard output.
"""

import sys
import threading
import traceback
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
from pydantic import BaseModel

STOP = "###STOP###"
TIME = "2025-06-21 11:20:00"
TASKS = 4


class Call(BaseModel):
    id: str = ""
    name: str
    arguments: dict[str, Any]
    requestor: str = "assistant"


class Spoken(BaseModel):
    content: str | None = None
    tool_calls: list[Call] | None = None

    def is_tool_call(self) -> bool:
        return self.tool_calls is not None


class AssistantMessage(Spoken):
    role: Literal["assistant"]


class UserMessage(Spoken):
    role: Literal["user"]


class SystemMessage(Spoken):
    role: Literal["system"]


class ToolMessage(BaseModel):
    id: str
    name: str
    role: Literal["tool"]
    content: str | None = None
    requestor: str = "assistant"
    error: bool = False


class MultiToolMessage(BaseModel):
    role: Literal["tool"]
    tool_messages: list[ToolMessage]


class Reason(StrEnum):
    USER_STOP = "user_stop"
    AGENT_STOP = "agent_stop"
    MAX_STEPS = "max_steps"
    TOO_MANY_ERRORS = "too_many_errors"


class ByThread:
    """Records that are visible only in the thread that made them."""

    records: ClassVar[dict[int, dict[str, int]]] = {}

    @classmethod
    def clear_thread_data(cls) -> None:
        cls.records[threading.get_ident()] = {}


class State(BaseModel):
    state_rubrics: list[str]


class Criteria(BaseModel):
    expected_states: list[State]
    overall_rubrics: list[str]


class Scenario(BaseModel):
    user_profile: dict[str, str]


class VitaTask(BaseModel):
    id: str
    environment: dict[str, Any]
    user_scenario: Scenario
    instructions: str
    evaluation_criteria: Criteria | None
    message_history: list[Any] | None = None


@dataclass
class Tool:
    name: str

    @property
    def openai_schema(self) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"item": {"type": "string"}}}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}


class World:
    def __init__(self, data: dict[str, Any], language: str) -> None:
        self.tools = SimpleNamespace(db=SimpleNamespace(time=data["time"]))
        self.language = language
        self._orders = count(1)
        ByThread.records.setdefault(threading.get_ident(), {}).update(data["goods"])

    def get_policy(self) -> str:
        return f"Serve in {self.language}. It is {{time}}."

    def get_tools(self) -> list[Tool]:
        return [Tool("price"), Tool("order")]

    def get_response(self, call: Call) -> ToolMessage:
        text, error = "", False
        try:
            price = ByThread.records[threading.get_ident()][call.arguments["item"]]
            text = str(price) if call.name == "price" else f"order {next(self._orders)}"
        except Exception as problem:  # noqa: BLE001 - as in VitaBench
            sys.modules["vita.environment.environment"].traceback.print_exc()
            text, error = f"Error: {problem}", True
        return ToolMessage(id=call.id, name=call.name, role="tool", content=text, error=error)


class BaseAgent:
    @classmethod
    def is_stop(cls, message: Spoken) -> bool:
        return STOP in (message.content or "")


class BaseUser:
    def __init__(self, instructions: str | None = None, llm: Any = None) -> None:
        self.instructions = instructions


class UserSimulator(BaseUser):
    def __init__(self, *, instructions: str, persona: str, language: str) -> None:
        super().__init__(instructions)
        self.prompt = f"{persona}, {instructions}, {language}"

    def get_init_state(self, message_history: Any = None) -> Any:
        state = SimpleNamespace(
            system_messages=[SystemMessage(role="system", content=self.prompt)],
            messages=list(message_history or ()),
        )
        swapped = {
            "assistant": UserMessage(role="user"),
            "user": AssistantMessage(role="assistant"),
        }
        state.flip_roles = lambda: [
            swapped[each.role].model_copy(update={"content": each.content})
            for each in state.messages
        ]
        return state

    @classmethod
    def is_stop(cls, message: Spoken) -> bool:
        return STOP in (message.content or "")


class Orchestrator:
    def __init__(self, domain: str, agent: Any, user: Any, environment: World, task: Any, **_: Any):
        self.agent, self.user, self.environment, self.task = agent, user, environment, task
        self.done, self.termination_reason = False, None
        self.step_count = self.num_errors = 0

    def initialize(self) -> None:
        history = list(self.task.message_history or ())
        greeting = AssistantMessage(role="assistant", content="Hello, how can I help you?")
        self.trajectory: list[Any] = history or [greeting]
        self.message = self.trajectory[-1]
        self.to_role = "agent" if history else "user"
        mine = [each for each in history if each.role != "tool" and not each.is_tool_call()]
        self.user_state = self.user.get_init_state(mine)

    def step(self) -> None:
        self.step_count += 1
        if self.to_role == "user":
            reply, self.user_state = self.user.generate_next_message(self.message, self.user_state)
            self.to_role = "agent"
            self._end_if(UserSimulator.is_stop(reply), Reason.USER_STOP)
        elif self.to_role == "agent":
            reply, _ = self.agent.generate_next_message(self.message, None)
            self.to_role = "env" if reply.is_tool_call() else "user"
            self._end_if(self.agent.is_stop(reply), Reason.AGENT_STOP)
        else:
            answers = [self.environment.get_response(call) for call in self.message.tool_calls]
            self.trajectory += answers
            self.message, self.to_role = answers[-1], "agent"
            return
        self.trajectory.append(reply)
        self.message = reply

    def _end_if(self, ended: bool, reason: Reason) -> None:
        if ended:
            self.done, self.termination_reason = True, reason


class Registry:
    def get_env_constructor(self, domain: str) -> Any:
        return World

    def get_tasks_loader(self, domain: str) -> Any:
        return lambda language: [
            VitaTask(
                id=str(number),
                environment={"time": TIME, "goods": {f"tea {number}": 10 + number}},
                user_scenario=Scenario(user_profile={"name": f"customer {number}"}),
                instructions=f"Order tea {number} by {domain}.",
                evaluation_criteria=Criteria(
                    expected_states=[State(state_rubrics=["tea is ordered"])],
                    overall_rubrics=["tea is ordered", "the price is told"],
                ),
            )
            for number in range(TASKS)
        ]


def _is_for_agent(message: Any) -> bool:
    return message.role != "user" or not message.is_tool_call()


def install(patch: pytest.MonkeyPatch) -> None:
    """Make the fake importable as `vita`, until the patch is undone."""
    modules: dict[str, dict[str, Any]] = {
        "loguru": {"logger": SimpleNamespace(disable=lambda name: None)},
        "vita.agent.base": {
            "BaseAgent": BaseAgent,
            "is_valid_agent_history_message": _is_for_agent,
        },
        "vita.data_model.message": {
            "AssistantMessage": AssistantMessage,
            "ToolCall": Call,
            "ToolMessage": ToolMessage,
            "UserMessage": UserMessage,
        },
        "vita.data_model.simulation": {"TerminationReason": Reason},
        "vita.data_model.tasks": dict.fromkeys(
            ("Location", "ProductBaseModel", "StoreBaseModel"), ByThread
        ),
        "vita.environment.environment": {"traceback": traceback},
        "vita.orchestrator.orchestrator": {"Orchestrator": Orchestrator},
        "vita.registry": {"registry": Registry()},
        "vita.user.base": {"STOP": STOP, "BaseUser": BaseUser},
        "vita.user.user_simulator": {"UserSimulator": UserSimulator},
        "vita.utils": {"get_weekday": lambda date, language: "Saturday"},
    }
    for name, content in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            module = ".".join(parts[:depth])
            if module not in modules and module in sys.modules:
                continue
            made = ModuleType(module)
            made.__path__ = [str(Path(__file__).parent / "nowhere")]
            patch.setitem(sys.modules, module, made)
            if depth > 1:
                patch.setattr(
                    sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], made, raising=False
                )
        vars(sys.modules[name]).update(content)
    patch.delitem(sys.modules, "unstale.research.adapters.vita", raising=False)
