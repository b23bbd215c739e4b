"""Task sets of the library verifiers (`verifiers.v1`, version 0.4).

Select one by `--task.env verifiers:my-taskset`. verifiers runs the episode with its own
task set, harness (an agent program) and runtime. The model that they call is unstale's endpoint,
which records every token. So the agents are trained like any `ExternalAgent`.
"""

import itertools
import os
import shutil
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError

from unstale.config import ConfigError
from unstale.envs import EnvError
from unstale.envs.external import ExternalAgent

KEY = "UNSTALE_API_KEY"
"""Name of the environment variable with the endpoint's key. It does not contain `API_KEY`, because
verifiers hides such variables from the programs that it starts.
"""


class VerifiersTasks(ExternalAgent):
    """The tasks of an installed verifiers task set.

    `env` is the section `env` of verifiers' configuration: agents, harness, runtime. Only the first
    `limit` tasks are used. The first `held_out` of them are held out, by default a fifth. By
    default, agents run without a container, and a harness that runs code is refused.
    """

    def __init__(
        self,
        taskset: str,
        *,
        held_out: int | None = None,
        limit: int = 10_000,
        env: Mapping[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        name = f"verifiers:{taskset}"
        section = {"interception": {"type": "server"}, **(env or {})}
        section["taskset"] = {**section.get("taskset", {}), "id": taskset}
        try:
            if not env or "agent" not in env:
                harness = vf.default_harness_id(taskset)
                if harness == "bash":  # the default for a task set that has no harness
                    harness = "null"
                section["agent"] = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
                if vf.load_harness(vf.harness_config_type(harness)(id=harness)).EXECUTES_CODE:
                    raise ConfigError(
                        f"{name} runs code of the policy; give it a container: env={{'agent': ...}}"
                    )
            self._config = vf.resolve_env_config(section)
            tasks = list(itertools.islice(vf.load_environment(self._config).taskset, limit))
        except (AttributeError, ImportError, TypeError, ValidationError, ValueError) as error:
            raise ConfigError(f"task.env {name!r} cannot be made: {error}") from error
        needs_uv = '"type":"subprocess"' in self._config.model_dump_json()
        if needs_uv and not shutil.which("uv"):
            raise ConfigError(
                f"{name} starts its harness with uv, which is not on the PATH: pip install uv"
            )
        held = len(tasks) // 5 if held_out is None else held_out
        if not 0 <= held < len(tasks):
            raise ConfigError(
                f"held_out must be below the {len(tasks)} tasks of {name}, got {held}"
            )
        super().__init__(self._episode, tasks[held:], held_out=tasks[:held], name=name, **limits)

    async def _episode(
        self, base_url: str, task: vf.Task, seed: int, api_key: str
    ) -> Mapping[str, float]:
        """Run one episode in a new environment, so that its connections are closed afterwards."""
        os.environ[KEY] = api_key
        context = vf.ModelContext(
            model="policy", client=vf.EvalClientConfig(base_url=base_url, api_key_var=KEY)
        )
        env = vf.load_environment(self._config)
        async with env.serving():
            episode = await env.run_episode(task, context)
        errors = list(episode.errors)
        for trace in episode.traces:
            errors += trace.errors
        if not episode.ok:
            message = f"{errors[-1].type}: {errors[-1].message}" if errors else "it is not complete"
            raise EnvError(f"the episode failed: {message}")
        return {
            name if len(episode.traces) == 1 else f"{trace.agent.name}/{name}": reward.value
            for trace in episode.traces
            for name, reward in trace.rewards.items()
            if reward is not None
        }


TASKSET = VerifiersTasks
