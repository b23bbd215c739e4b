"""The environment `tau2:DOMAIN`: its options. The adapter itself needs the library tau2."""

import os
from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from unstale.config import ConfigError, TaskConfig
from unstale.config.checks import NonNegative
from unstale.config.tasks import EnvSpec
from unstale.envs import Taskset
from unstale.envs.registry import make_with_library

KEY = "OPENAI_API_KEY"
"""The environment variable with the API key of the endpoint."""
USER_TIMEOUT_S = 50.0
"""Longest time in seconds for an answer of the model that plays the user. It is below the default
of `rollout.timeout_s`, 60.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tau2Config(TaskConfig):
    """The tasks of a domain of tau2-bench, or of all three (`tau2:all`)."""

    reward_names: ClassVar[tuple[str, ...]] = ("state",)

    env: str = "tau2:retail"
    """`tau2:retail`, `tau2:airline`, `tau2:telecom` or `tau2:all`."""
    user: str = ""
    """URL of the OpenAI-compatible endpoint whose model plays the user, such as
    http://127.0.0.1:8000/v1. Its key is read from OPENAI_API_KEY. Empty means a scripted user.
    """
    user_model: str = "policy"
    """Name of the model that plays the user. `unstale serve` calls its model `policy`."""
    user_temperature: NonNegative = 0.0
    """Sampling temperature of the model that plays the user."""
    policy_document: bool = True
    """Include the domain's policy document in the system prompt (6,000 to 30,000 characters).
    A policy trained without it must learn the procedures from the tasks.
    """
    eval_split: Literal["test", "train"] = "test"
    """The split of tau2 for evaluation. `train` measures success on the tasks of training."""

    @property
    def largest_reward(self) -> float:
        return 1.0

    def check_combination(self) -> None:
        super(Tau2Config, self).check_combination()
        check_url("task.user", self.user)
        if self.user and "@" in self.env:
            raise ConfigError(
                f"task.env {self.env} and task.user {self.user} both name a model for the user: "
                "give one of them"
            )


def check_url(name: str, url: str) -> None:
    """Raise `ConfigError` if an option is neither empty nor the URL of an endpoint."""
    try:
        parts = urlsplit(url)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of an IPv6 address or a port
        complete = False
    printable = url.isascii() and url.isprintable() and " " not in url
    if url and not (complete and printable):
        raise ConfigError(
            f"{name} must be the URL of an endpoint, such as http://127.0.0.1:8000/v1, got {url!r}"
        )


def _make(options: Tau2Config) -> Taskset:
    shown = {"policy_document": options.policy_document, "eval_split": options.eval_split}
    if not options.user:
        return make_with_library(options, **shown)
    endpoint = {
        "api_base": options.user,
        "api_key": os.environ.get(KEY) or "none",  # a word, for endpoints that need no key
        "temperature": options.user_temperature,
        "timeout": USER_TIMEOUT_S,
    }
    model = f"openai/{options.user_model}"
    return make_with_library(options, user=model, user_args=endpoint, **shown)


ENV = EnvSpec("tau2", _make, Tau2Config, takes_source=True)
