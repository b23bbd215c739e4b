"""List the models that are refused, at an earlier commit and at this one.

    python -m benchmarks.refusals        # a few minutes on two cores

Each small model of the gauntlet is loaded in float32 and checked for sequences of 256 tokens, by
the code of both commits. Three more models have what packing, or any sampling token by token, does
not allow. Writes a dated table under benchmarks/results/.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import tables
from unstale.config.run import SHIPPED_POLICY
from unstale.model.loading import load_tokenizer
from unstale.testing import pictures
from unstale.testing.architectures import ARCHITECTURES, Architecture, save_architecture
from unstale.testing.gauntlet import MAX_CONTEXT

EARLIER = "36e0e766"
"""The commit before models could be computed apart."""
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 64,
}
LIMITED: Mapping[str, Architecture] = {
    "Llama 4, chunks of 64 tokens": Architecture(
        "llama4_text", {**ARCHITECTURES["Llama 4"].sizes, "attention_chunk_size": 64}
    ),
    "Phi-3, longrope beyond 64 tokens": Architecture(
        "phi3", {"original_max_position_embeddings": 64, "rope_parameters": _LONG_ROPE}
    ),
    "BERT, whose tokens see later ones": Architecture("bert"),
}
"""Models with a limit that their row names."""
_CHECK = """
import json, sys, warnings
from pathlib import Path
from unstale.config import ConfigError
from unstale.model.policy import Policy
warnings.simplefilter("ignore")
found = {}
for folder in Path(sys.argv[1]).iterdir():
    try:
        policy = Policy.load(folder, device="cpu")
        policy.check_length(int(sys.argv[2]))
        found[folder.name] = "apart" if getattr(policy, "computes_apart", False) else "packed", ""
    except Exception as error:
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        found[folder.name] = "refused", kind + str(error)
print(json.dumps(found))
"""


def save_all(folder: Path) -> None:
    """Save each model to a folder with its name."""
    for name, architecture in (ARCHITECTURES | LIMITED).items():
        save_architecture(architecture, folder / name, planted=False)
    for name, kind in pictures.NAMES.items():
        pictures.save_vision_model(kind, folder / name, load_tokenizer(SHIPPED_POLICY))


def verdicts(models: Path, code: Path) -> dict[str, tuple[str, str]]:
    """Return name of a model -> "packed", "apart" or "refused", and the reason of a refusal."""
    command = [sys.executable, "-c", _CHECK, str(models), str(MAX_CONTEXT)]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    done = subprocess.run(command, env=environment, cwd=code, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def extract(commit: str, folder: Path) -> None:
    """Write the package of a commit to a folder."""
    command = ["git", "-C", str(tables.ROOT), "archive", commit, "unstale"]
    packed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--earlier", default=EARLIER, metavar="COMMIT")
    chosen = parser.parse_args()
    with TemporaryDirectory() as name:
        models, code = Path(name) / "models", Path(name) / "code"
        models.mkdir()
        save_all(models)
        extract(chosen.earlier, code)
        before, after = verdicts(models, code), verdicts(models, tables.ROOT)
    lines = [
        f"Small random models in float32, checked for {MAX_CONTEXT} tokens. Packed: sequences "
        "share a forward pass. Apart: each has its own. The reason is that of the refusal at this "
        "commit, or else at the earlier one.",
        "",
        *tables.columns("model", f"at {chosen.earlier}", "at this commit", "reason"),
    ]
    for name in (*ARCHITECTURES, *pictures.NAMES, *LIMITED):
        reason = (after[name][1] or before[name][1]).removeprefix("policy: ").replace("|", "/")
        lines.append(tables.row(name, before[name][0], after[name][0], " ".join(reason.split())))
    counts = [sum(each == "refused" for each, _ in found.values()) for found in (before, after)]
    lines += ["", f"Refused: {counts[0]} of {len(before)}, then {counts[1]} of {len(after)}."]
    tables.write("models", "Models that are refused", lines)


if __name__ == "__main__":
    main()
