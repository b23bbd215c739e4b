"""The command `tinker`: serve a model to clients of Tinker."""

import argparse
import os
from pathlib import Path

from unstale.cli.preflight import quick_imports
from unstale.cli.verbs import COUNT, argument, command
from unstale.config import SHIPPED_POLICIES, ConfigError, EndpointConfig, install
from unstale.config.checks import bounded


def _tinker(chosen: argparse.Namespace) -> int:
    from unstale.cli.trained import policy_folder
    from unstale.config.hub import model_folder

    folder = SHIPPED_POLICIES.get(chosen.model)
    folder = folder or policy_folder(model_folder(chosen.model))
    config = EndpointConfig(
        host=chosen.host,
        public_host=chosen.public_host,
        certificate=chosen.certificate,
        allow_plaintext=chosen.allow_plaintext,
    )
    try:
        with quick_imports():
            from unstale.research.tinker.server import new_token, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"tinker needs {error.name}: {install('endpoint')}") from error
    tokens = os.environ.get("UNSTALE_TOKEN", "").split()
    serve(
        folder,
        chosen.folder,
        tokens or [new_token() for _ in range(chosen.tenants)],
        name=chosen.name or chosen.model,
        max_rank=chosen.max_rank,
        max_context=chosen.max_context,
        dtype=chosen.dtype,
        config=config,
        port=chosen.port,
    )
    return 0


add = command(
    "tinker",
    "serve a model to clients of Tinker, which train and sample it",
    argument("model", help="a model folder, a run, or org/name in the local cache of the hub"),
    argument("--name", default="", help="the base model's name for clients (default: MODEL)"),
    argument(
        "--folder",
        type=Path,
        default=Path("runs/tinker"),
        metavar="FOLDER",
        help="where saved weights are kept (default: runs/tinker)",
    ),
    argument(
        "--tenants",
        type=COUNT,
        default=1,
        metavar="N",
        help="number of tokens, whose owners do not see each other (default: 1)",
    ),
    argument("--max-rank", type=COUNT, default=32, metavar="N", help="default: 32"),
    argument(
        "--max-context",
        type=bounded(int, 2, 1 << 20),
        default=2048,
        metavar="N",
        help="default: 2048",
    ),
    argument("--dtype", choices=["float32", "bfloat16"], default="float32"),
    argument(
        "--port", type=bounded(int, 0, 65535), default=0, metavar="N", help="default: a free one"
    ),
    argument("--host", default="127.0.0.1", help="as endpoint.host (default: loopback)"),
    argument("--public-host", default="", help="as endpoint.public_host"),
    argument("--certificate", default="", metavar="FILE", help="as endpoint.certificate"),
    argument("--allow-plaintext", action="store_true", help="as endpoint.allow_plaintext"),
)(_tinker)
