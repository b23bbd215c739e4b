"""Create the objects of a run, such as model, engine, trainer and queue, from its `RunConfig`.

`sampling` creates task set, engine and rollout. `local` and `ranked` create the trainer, in this
process or on trainer ranks. `run` connects all of these for the training loop.
"""

from unstale.builders.components import Components
from unstale.builders.local import (
    LocalComponents,
    build_advantage,
    build_old_logps,
    build_scorer,
    build_trainer,
)
from unstale.builders.policy import (
    load_policy,
    loads_in_place,
    lora_of,
    reads_old_versions,
    shares_deltas,
)
from unstale.builders.ranked import build_rank
from unstale.builders.run import build, build_components
from unstale.builders.sampling import (
    build_chat,
    build_engine,
    build_generator,
    build_rollout,
    build_sampler,
    build_server,
    ends_freely,
    for_evaluation,
    warn_of_hidden_tools,
    without_tasks,
)

__all__ = [
    "Components",
    "LocalComponents",
    "build",
    "build_advantage",
    "build_chat",
    "build_components",
    "build_engine",
    "build_generator",
    "build_old_logps",
    "build_rank",
    "build_rollout",
    "build_sampler",
    "build_scorer",
    "build_server",
    "build_trainer",
    "ends_freely",
    "for_evaluation",
    "load_policy",
    "loads_in_place",
    "lora_of",
    "reads_old_versions",
    "shares_deltas",
    "warn_of_hidden_tools",
    "without_tasks",
]
