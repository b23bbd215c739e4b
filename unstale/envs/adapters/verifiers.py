"""Task sets of verifiers: `--task.env verifiers:my-taskset` (`verifiers.v1`, version 0.4).

verifiers runs the episode with its task set, harness (an agent program) and runtime. Its model is the
recording endpoint, so its agents are trained like any `ExternalAgent`.
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
"""Environment variable of the endpoint's key. verifiers hides `*API_KEY*` from its programs."""


class VerifiersTasks(ExternalAgent):
    """An installed task set. `env` is verifiers' section of that name: agents, harness, runtime.

    Of the first `limit` tasks, the first `held_out` are held out, by default a fifth. Agents run
    without a container by default; a harness that runs code is then refused.
    """

    def __init__(
        self, taskset: str, *, held_out: int | None = None, limit: int = 10_000, env: Mapping[str, Any] | None = None,
        **limits: Any,
    ) -> None:  # fmt: skip
        name = f"verifiers:{taskset}"
        given = {"interception": {"type": "server"}, **(env or {})}
        given["taskset"] = {**given.get("taskset", {}), "id": taskset}
        try:
            if not env or "agent" not in env:
                own = vf.default_harness_id(taskset)
                harness = (
                    "null" if own == "bash" else own
                )  # bash is what verifiers takes when a task set brings none
                given["agent"] = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
                if vf.load_harness(vf.harness_config_type(harness)(id=harness)).EXECUTES_CODE:
                    raise ConfigError(
                        f"{name} runs what the policy writes; give it a container: env={{'agent': ...}}"
                    )
            self._config = vf.resolve_env_config(given)
            tasks = list(itertools.islice(vf.load_environment(self._config).taskset, limit))
        except (AttributeError, ImportError, TypeError, ValidationError, ValueError) as error:
            raise ConfigError(f"task.env {name!r} cannot be made: {error}") from error
        if self._config.model_dump_json().find('"type":"subprocess"') >= 0 and not shutil.which(
            "uv"
        ):
            raise ConfigError(
                f"{name} starts its harness with uv, which is not on the PATH: pip install uv"
            )
        kept = len(tasks) // 5 if held_out is None else held_out
        if not 0 <= kept < len(tasks):
            raise ConfigError(
                f"{name} has {len(tasks)} tasks; {kept} are to be held out, and one has to be left"
            )
        super().__init__(self._episode, tasks[kept:], held_out=tasks[:kept], name=name, **limits)

    async def _episode(
        self, base_url: str, task: vf.Task, seed: int, api_key: str
    ) -> Mapping[str, float]:
        """Run one episode in an environment of its own, which closes its connections."""
        os.environ[KEY] = api_key
        context = vf.ModelContext(
            model="policy", client=vf.EvalClientConfig(base_url=base_url, api_key_var=KEY)
        )
        env = vf.load_environment(self._config)
        async with env.serving():
            episode = await env.run_episode(task, context)
        failed = [error for one in (episode, *episode.traces) for error in one.errors]
        if not episode.ok:
            raise EnvError(
                f"{failed[-1].type}: {failed[-1].message}"
                if failed
                else "the episode is not complete"
            )
        return {
            name if len(episode.traces) == 1 else f"{trace.agent.name}/{name}": reward.value
            for trace in episode.traces
            for name, reward in trace.rewards.items()
            if reward is not None
        }


TASKSET = VerifiersTasks
