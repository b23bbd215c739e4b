"""The environment `tau2:DOMAIN`: its options. The adapter itself needs the library tau2."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from unstale.config import ConfigError
from unstale.config.tasks import EnvSpec
from unstale.envs import Taskset
from unstale.envs.registry import make_with_library
from unstale.research.envs.orchestrated import USER_TIMEOUT_S, SimulatedUserConfig, api_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Tau2Config(SimulatedUserConfig):
    """The tasks of a domain of tau2-bench, or of all three (`tau2:all`)."""

    reward_names: ClassVar[tuple[str, ...]] = ("state",)

    env: str = "tau2:retail"
    """`tau2:retail`, `tau2:airline`, `tau2:telecom` or `tau2:all`."""
    policy_document: bool = True
    """Include the domain's policy document in the system prompt (6,000 to 30,000 characters).
    A policy trained without it must learn the procedures from the tasks.
    """
    eval_split: Literal["test", "train"] = "test"
    """The tau2 split for evaluation. `train` evaluates on the training tasks."""

    @property
    def largest_reward(self) -> float:
        return 1.0

    def check_combination(self) -> None:
        super(Tau2Config, self).check_combination()
        if self.user and "@" in self.env:
            raise ConfigError(
                f"task.env {self.env} and task.user {self.user} both name a model for the user: "
                "give one of them"
            )


def _make(options: Tau2Config) -> Taskset:
    shown = {"policy_document": options.policy_document, "eval_split": options.eval_split}
    if not options.user:
        return make_with_library(options, **shown)
    endpoint = {
        "api_base": options.user,
        "api_key": api_key(),
        "temperature": options.user_temperature,
        "timeout": USER_TIMEOUT_S,
    }
    model = f"openai/{options.user_model}"
    return make_with_library(options, user=model, user_args=endpoint, **shown)


ENV = EnvSpec("tau2", _make, Tau2Config, takes_source=True)
