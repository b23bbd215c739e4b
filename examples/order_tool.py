"""An environment with one tool: the agent looks up an order and names its status.

    unstale train llm --model MODEL --task.env examples.order_tool:OrderTasks

An episode ends with the first reply that has no tool call. The reward is 1 if this reply names the
status of the order.
"""

from random import Random

from unstale.envs import Message, NumberedTasks, ToolCall, Turn, tool_schema
from unstale.records import Task

STATUSES = ("packed", "shipped", "delivered", "returned")
TOOL = tool_schema(
    "get_order",
    "Return the status of an order.",
    {"order_id": {"type": "integer", "description": "The number of the order."}},
)


class OrderEnv:
    """One customer who asks for the status of one order."""

    def __init__(self, order_id: int, status: str) -> None:
        self.order_id = order_id
        self.status = status
        self.tool_errors = 0

    async def begin(self) -> Turn:
        """Return the first messages. The chat template adds the schemas of the tools."""
        return Turn(
            (
                Message("system", "Look up orders with the tool. Then answer in one sentence."),
                Message("user", f"What is the status of order {self.order_id}?"),
            )
        )

    async def step(self, reply: Message) -> Turn:
        """Answer each call with one message of role `tool`, in the order of the calls."""
        results = [Message("tool", await self.result(call)) for call in reply.tool_calls]
        facts = {"tool_errors": self.tool_errors}
        if results:
            return Turn(tuple(results), facts=facts)
        is_right = self.status in reply.content.lower()
        return Turn((), done=True, rewards={"answer": is_right}, facts=facts)

    async def result(self, call: ToolCall) -> str:
        """Return the text of a result. The policy reads errors, so that it can call again."""
        try:
            if call.error:  # the call could not be read, for example because its JSON is broken
                raise ValueError(call.error)
            if call.name != "get_order":
                raise ValueError(f"unknown tool {call.name!r}; the tool is get_order")
            if set(call.arguments) != {"order_id"}:
                raise ValueError("get_order takes order_id")
            if call.arguments["order_id"] != self.order_id:  # a real tool would ask a database
                raise ValueError("there is no such order")
        except ValueError as error:
            self.tool_errors += 1
            return f"Error: {error}"
        return f"order {self.order_id}: {self.status}"


class OrderTasks(NumberedTasks):
    """Tasks by number. `NumberedTasks` has the methods `train` and `held_out`."""

    name = "orders"
    tools = (TOOL,)

    def env(self, task: Task, seed: int) -> OrderEnv:
        random = Random(self.seed_of(task))  # odd for training tasks, even for held-out ones
        return OrderEnv(random.randrange(100, 1000), random.choice(STATUSES))
