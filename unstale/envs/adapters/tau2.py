"""The customer service of tau2-bench: `--task.env tau2:retail`, `tau2:airline`, `tau2:telecom`.

Needs tau2, installed from its source. tau2's orchestrator exchanges the messages, and the policy is
its agent. The simulated user is scripted (offline) or a model (`tau2:retail@openai/gpt-4.1`, a name
of litellm). The reward is tau2's reward for the final state. Assertions in natural language are
left out, because they need a judge.
"""

import asyncio
import json
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from unstale.config import ConfigError, nearest
from unstale.envs import ListedTasks, Message, Turn
from unstale.records import Task

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # tau2 would be downloaded on import
try:
    from loguru import logger

    logger.disable("tau2")
    from tau2.agent.base_agent import HalfDuplexAgent, is_valid_agent_history_message
    from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
    from tau2.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage
    from tau2.data_model.simulation import TerminationReason
    from tau2.data_model.tasks import InitialState, RewardType
    from tau2.evaluator.evaluator_communicate import CommunicateEvaluator
    from tau2.evaluator.evaluator_env import EnvironmentEvaluator
    from tau2.orchestrator.orchestrator import Orchestrator, Role
    from tau2.registry import registry
    from tau2.runner.build import build_user
    from tau2.user.user_simulator_base import STOP, TRANSFER, HalfDuplexUser
    from tau2.utils import DATA_DIR
except ImportError as error:
    raise ImportError(
        f"tau2:<domain> needs tau2-bench from its source ({error}): pip install ./tau2-bench, "
        "Python 3.12 or 3.13; `tau2` in package registries is another project"
    ) from error

DOMAINS = ("airline", "retail", "telecom")
MAX_STEPS = 200
"""Largest number of messages in an episode, as in tau2's runs."""
MAX_ERRORS = 10
"""Largest number of failed calls in an episode, as in tau2's runs."""
THREADS = 64
"""Number of episodes that can wait for their simulated users at the same time."""
USER_ARGS = {"temperature": 0.0, "timeout": 50.0}
"""Sampling options for a model that plays the user."""

_TRANSFERRED = "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT"


class Tau2Tasks(ListedTasks):
    """The tasks of a tau2 domain. tau2's split `test` is held out.

    `user` is the name of the model that plays the user, or "" for a scripted user. `user_args` are
    litellm's arguments, such as `api_base`.
    """

    def __init__(
        self, domain: str, *, user: str = "", user_args: Mapping[str, Any] = USER_ARGS
    ) -> None:
        domain, _, model = domain.partition("@")
        if domain not in DOMAINS:
            raise ConfigError(
                f"tau2's domain must be one of {', '.join(DOMAINS)}; "
                f"got {domain!r}{nearest(domain, DOMAINS)}"
            )
        self.name = f"tau2:{domain}"
        self.domain = domain
        self.user = user or model
        self.user_args = dict(user_args)
        # The event loop's thread pool is small, and engines need it for weight updates.
        self.threads = ThreadPoolExecutor(THREADS, "tau2")
        try:
            environment = self.environment()
            tasks = registry.get_tasks_loader(domain)(None)
            split = registry.get_task_splits_loader(domain)()
        except FileNotFoundError as error:
            raise ConfigError(
                f"tau2 has no data in {DATA_DIR} ({error}); set TAU2_DATA_DIR to its data folder"
            ) from error
        by_id = {task.id: task for task in tasks}
        self.data = {
            "train": [by_id[name] for name in split["train"]],
            "held_out": [by_id[name] for name in split["test"]],
        }
        self.tools: tuple[Mapping[str, Any], ...] = tuple(
            tool.openai_schema for tool in environment.get_tools()
        )
        self.system = SYSTEM_PROMPT.format(
            agent_instruction=AGENT_INSTRUCTION, domain_policy=environment.get_policy()
        )

    def environment(self) -> Any:
        """Return a new environment of the domain."""
        return registry.get_env_constructor(self.domain)()

    def env(self, task: Task, seed: int) -> "Tau2Env":
        """Return the environment of a task.

        `seed` is not used, because only a user's model is random.
        """
        kind = LiveEnv if self.user else Tau2Env
        return kind(self, self.data_of(task))


class Tau2Env:
    """One conversation: the policy answers messages of the user and results of its tool calls."""

    def __init__(self, tasks: Tau2Tasks, task: Any) -> None:
        self._tasks = tasks
        self._task = task
        self._orchestrator: Any = None

    async def begin(self) -> Turn:
        return await self._in_thread(self._begin)

    async def step(self, reply: Message) -> Turn:
        return await self._in_thread(self._step, reply)

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(
            self._tasks.threads, work, *arguments
        )

    def _begin(self) -> Turn:
        self._start(self._task)
        return Turn((Message("system", self._tasks.system), *self._messages_since(0)))

    def _start(self, task: Any) -> None:
        """Start tau2's orchestrator and run it until it is the policy's turn."""
        world = self._tasks.environment()
        policy = PolicyAgent([], "")
        if self._tasks.user:
            model = {"llm": self._tasks.user, "llm_args": self._tasks.user_args}
            user = build_user("user_simulator", world, task, **model)
        else:
            user = ScriptedUser(task, world, policy)
        limits = {"max_steps": MAX_STEPS, "max_errors": MAX_ERRORS}
        self._orchestrator = Orchestrator(self._tasks.domain, policy, user, world, task, **limits)
        self._orchestrator.initialize()
        self._run_to_policy()

    def _run_to_policy(self) -> None:
        """Run tau2's orchestrator until it is the policy's turn."""
        orchestrator = self._orchestrator
        while not orchestrator.done and orchestrator.to_role != Role.AGENT:
            orchestrator.step()
            orchestrator._check_termination()

    def _step(self, reply: Message) -> Turn:
        orchestrator = self._orchestrator
        text = reply.content.rpartition("</think>")[2].strip()
        calls = [
            ToolCall(
                id=f"call_{orchestrator.step_count}_{place}",
                name=call.name,
                arguments=dict(call.arguments),
            )
            for place, call in enumerate(reply.tool_calls)
        ]
        if not (calls or text):
            return Turn((), done=True, rewards={"state": 0.0}, facts={"empty_reply": 1.0})
        before = len(orchestrator.trajectory) + 1
        orchestrator.agent.reply = AssistantMessage(
            role="assistant", content=text or None, tool_calls=calls or None
        )
        orchestrator.step()
        self._run_to_policy()
        if orchestrator.done:
            return self._end()
        answers = list(self._messages_since(before))
        for place, call in enumerate(reply.tool_calls):
            if call.error:
                answers[place] = Message("tool", f"Error: {call.error}")
        return Turn(tuple(answers))

    def _messages_since(self, start: int) -> tuple[Message, ...]:
        """Return the messages for the policy.

        The user's tool calls and the agent's greeting are left out.
        """
        return tuple(
            Message("tool" if isinstance(message, ToolMessage) else "user", message.content)
            for message in self._orchestrator.trajectory[start:]
            if is_valid_agent_history_message(message) and not isinstance(message, AssistantMessage)
        )

    def _end(self) -> Turn:
        """Return the last turn with tau2's reward.

        It is 0 unless the user ended the conversation.
        """
        trajectory = self._orchestrator.get_trajectory()
        if self._orchestrator.termination_reason != TerminationReason.USER_STOP:
            return Turn((), done=True, rewards={"state": 0.0})
        result = EnvironmentEvaluator.calculate_reward(
            registry.get_env_constructor(self._tasks.domain), self._task, trajectory
        )
        facts = {}
        if RewardType.COMMUNICATE in self._task.evaluation_criteria.reward_basis:
            communication = CommunicateEvaluator.calculate_reward(self._task, trajectory)
            facts["communicated"] = communication.reward
        return Turn((), done=True, rewards={"state": result.reward}, facts=facts)


class LiveEnv(Tau2Env):
    """A conversation in which a model plays the user.

    It is resumed from its recorded messages, because the model could give other answers when asked
    again.
    """

    def snapshot(self) -> str:
        fields = {"role", "id", "content", "tool_calls", "requestor", "error"}
        orchestrator = self._orchestrator
        messages = [
            message.model_dump(mode="json", include=fields, exclude_none=True)
            for message in orchestrator.trajectory
        ]
        return json.dumps(
            {"steps": orchestrator.step_count, "errors": orchestrator.num_errors, "said": messages}
        )

    async def resume(self, state: str) -> None:
        """Restore the conversation from its messages. tau2 repeats the recorded tool calls."""
        record = json.loads(state)
        messages = [_KINDS[message["role"]].model_validate(message) for message in record["said"]]
        initial = (self._task.initial_state or InitialState()).model_copy(
            update={"message_history": messages}
        )
        await self._in_thread(self._start, self._task.model_copy(update={"initial_state": initial}))
        self._orchestrator.step_count = record["steps"]
        self._orchestrator.num_errors = record["errors"]


_KINDS = {"assistant": AssistantMessage, "tool": ToolMessage, "user": UserMessage}


class PolicyAgent(HalfDuplexAgent[None]):
    """An agent for tau2's orchestrator whose answers are the replies of the policy."""

    reply: AssistantMessage
    calls = 0
    """Number of tool calls made so far."""

    def get_init_state(self, message_history: Any = None) -> None: ...

    def generate_next_message(self, message: Any, state: None) -> tuple[AssistantMessage, None]:
        self.calls += len(self.reply.tool_calls or ())
        return self.reply, None


class ScriptedUser(HalfDuplexUser[None]):
    """A user that follows a fixed script instead of a model.

    First it sends its instructions. If a message of the agent names a tool, it calls the tool with
    the task's arguments. It agrees to everything else. It ends the conversation after two messages
    without a call.
    """

    def __init__(self, task: Any, world: Any, policy: PolicyAgent) -> None:
        super().__init__(instructions=str(task.user_scenario.instructions))
        self._policy = policy
        self._seen_calls = 0
        self._idle = -1
        """Number of messages of the policy since the user's last call; -1 before the first call."""
        self._tools = world.user_tools.get_tools() if world.user_tools else {}
        names = "|".join(
            sorted((name.replace("_", "[_ ]") for name in self._tools), key=len, reverse=True)
        )
        self._named = re.compile(rf"\b({names or '(?!)'})\b", re.IGNORECASE)
        self._arguments: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
        for action in task.evaluation_criteria.actions or ():
            if action.requestor == "user":
                self._arguments[action.name].append(action.arguments)

    def get_init_state(self, message_history: Any = None) -> None: ...

    def generate_next_message(self, message: Any, state: None) -> tuple[UserMessage, None]:
        calls: list[ToolCall] = []
        if not isinstance(message, AssistantMessage):  # results of the user's calls
            results = getattr(message, "tool_messages", [message])
            text = "\n".join(result.content for result in results)
        elif self._idle < 0:
            text = f"This is what I call about.\n{self.instructions}"
            self._idle = 0
        else:
            text, calls = self._answer(message.content)
        return UserMessage(role="user", content=text or None, tool_calls=calls or None), None

    def _answer(self, message: str) -> tuple[str, list[ToolCall]]:
        """Return the user's answer to a message of the policy: a text or calls."""
        if _TRANSFERRED in message:
            return TRANSFER, []
        named = [name.lower().replace(" ", "_") for name in self._named.findall(message)]
        calls = [
            self._call(name, place) for place, name in enumerate(named) if self._can_call(name)
        ]
        self._idle = 0 if calls or self._policy.calls > self._seen_calls else self._idle + 1
        self._seen_calls = self._policy.calls
        if calls:
            return "", calls
        if named:
            return f"I do not know what to enter for {' or '.join(named)}.", []
        if self._idle > 1:
            return STOP, []
        return "Yes, please go ahead. If all of it is done, tell me so.", []

    def _can_call(self, name: str) -> bool:
        fields = self._tools[name].params.model_fields.values()
        return bool(self._arguments[name]) or not any(field.is_required() for field in fields)

    def _call(self, name: str, place: int) -> ToolCall:
        recorded = self._arguments[name] or deque([{}])
        arguments = recorded.popleft() if len(recorded) > 1 else recorded[0]
        return ToolCall(id=f"user_{place}", name=name, arguments=dict(arguments), requestor="user")


TASKSET = Tau2Tasks
