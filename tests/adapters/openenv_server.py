"""OpenEnv servers for tests: `python openenv_server.py guess|line|tools PORT SESSIONS`."""

import random
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Said(Action):
    message: str


class Move(Action):
    """A step on the line."""

    by: int
    loud: bool = False


class Heard(Observation):
    text: str = ""
    place: int | None = None


class Sessions(Environment[Any, Any, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    @property
    def state(self) -> State:
        return State()


class Guess(Sessions):
    """A game: guess a number from 1 to 9 within 4 replies."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        self.number, self.left = random.Random(seed).randint(1, 9), 4
        return Heard(text="Guess a number from 1 to 9.")

    def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Heard:
        if action.message == "break":
            raise ValueError("it is broken")
        self.left -= 1
        right = action.message == str(self.number)
        return Heard(text="No.", reward=1.0 if right else -0.25, done=right or not self.left)


class Line(Sessions):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        self.place = 0
        return Heard(text="Get to 3.", place=0)

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Heard:
        self.place += action.by
        return Heard(place=self.place, reward=float(self.place == 3), done=self.place == 3)


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            """Return the sum of two numbers."""
            return a + b

        super().__init__(server)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_: Any
    ) -> Observation:
        return Heard(text="Add 2 and 3.")

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("only tools")

    @property
    def state(self) -> State:
        return State()


KINDS: dict[str, Any] = {
    "guess": (Guess, Said, Heard),
    "line": (Line, Move, Heard),
    "tools": (Tools, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    kind, port, sessions = sys.argv[1:]
    app = create_fastapi_app(*KINDS[kind], max_concurrent_envs=int(sessions))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
