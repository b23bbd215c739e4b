"""Find the folder of the policy that a supervised start makes (section `sft`)."""

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unstale.config.run import RunConfig

STARTS = "starts"
"""Name of the folder next to the run folders that has the policies of supervised starts."""


def start_folder(config: "RunConfig") -> Path:
    """Return the folder for the policy of a run's supervised start. It may not exist yet.

    Runs whose supervised starts are the same (`start_options`) have the same folder.
    """
    text = json.dumps(start_options(config), sort_keys=True, default=str)
    return config.runs / STARTS / sha256(text.encode()).hexdigest()[:12]


def start_options(config: "RunConfig") -> dict[str, Any]:
    """Return everything that decides about a supervised start: options and the files of the
    weights.
    """
    weights = sorted(config.pretrained_folder.glob("*.safetensors"))
    return {
        "model": config.model,
        "weights": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weights],
        "seed": config.seed,
        "task": {**asdict(config.task), "env": config.sft.env or config.task.env},
        "sft": asdict(config.sft),
        "chat_template": config.chat_template,
        "chat_template_kwargs": config.chat_template_kwargs,
        "tools_in_prompt": config.tools_in_prompt,
        "max_context": config.engine.max_context,
        "temperature": config.engine.temperature,
    }
