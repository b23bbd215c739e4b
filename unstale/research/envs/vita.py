"""The environment `vita:DOMAIN`: its options. The adapter itself needs the library vita."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from unstale.config import ConfigError
from unstale.config.checks import PositiveInt
from unstale.config.tasks import EnvSpec
from unstale.envs import Taskset
from unstale.envs.registry import make_with_library
from unstale.research.envs.orchestrated import SimulatedUserConfig, check_url


@dataclass(frozen=True, slots=True, kw_only=True)
class VitaConfig(SimulatedUserConfig):
    """The tasks of a domain of VitaBench, or of both (`vita:all`)."""

    reward_names: ClassVar[tuple[str, ...]] = ("rubrics",)

    env: str = "vita:delivery"
    """`vita:delivery`, `vita:instore` or `vita:all`."""
    judge: str = ""
    """URL of the OpenAI-compatible endpoint whose model decides which requirements of a task are
    met. Its key is read from OPENAI_API_KEY.
    """
    judge_model: str = "policy"
    """Name of the judge's model."""
    judge_tokens: PositiveInt = 100_000_000
    """Largest number of tokens, prompts included, that the judge may use in one process. Each
    worker of `task.isolate` is a process.
    """
    language: Literal["english", "chinese"] = "english"
    """Language of the tasks, of the tools and of the user."""

    @property
    def largest_reward(self) -> float:
        return 1.0

    def check_combination(self) -> None:
        super(VitaConfig, self).check_combination()
        check_url("task.judge", self.judge)


def _make(options: VitaConfig) -> Taskset:
    if not options.judge:
        raise ConfigError(
            f"task.env {options.env} needs a judge: give the URL of an OpenAI-compatible endpoint, "
            "as in --task.judge http://127.0.0.1:8000/v1"
        )
    return make_with_library(options, options=options)


ENV = EnvSpec("vita", _make, VitaConfig, takes_source=True)
