"""The command `oracle`: rewards of task folders with and without their solutions."""

import json
from pathlib import Path

import pytest

from tests.envs.test_terminal import SECRET, harbor
from unstale.cli.main import main

COPIES = """#!/bin/bash
cd "$(dirname "$0")" && cp "parts of it/bytes" /app/bytes && echo $WHO > /app/who
"""
COMPARES = """#!/bin/bash
mkdir -p /logs/verifier; printf '\\0\\377%%s' > want
cmp want bytes && [ "$(cat who)" = "you there" ]; echo $((1 - $?)) > /logs/verifier/reward.txt
"""


def test_oracle_tells_which_solutions_their_tests_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = f"printf {SECRET} > answer.txt"
    always = "echo 1 > /logs/verifier/reward.txt"
    for name, files in {
        "binary": {
            "tests/test.sh": COMPARES,
            "solution/solve.sh": COPIES,
            "task.toml": "[solution.env]\nWHO = 'you there'\n",
        },
        "broken": {"environment/Dockerfile": "FROM scratch\nRUN exit 3\n"},
        "gpu": {"task.toml": "[environment]\ngpus = 1\n"},
        "lenient": {"tests/test.sh": f"#!/bin/bash\n{always}\n"},
        "none": {},
        "right": {},
        "wrong": {"solution/solve.sh": "echo it is wrong"},
    }.items():
        harbor(tmp_path / name, **{"solution/solve.sh": right, **files})
    (tmp_path / "none/solution/solve.sh").unlink()
    (tmp_path / "binary/solution/parts of it").mkdir()
    (tmp_path / "binary/solution/parts of it/bytes").write_bytes(b"\0\xff%s")
    with pytest.raises(SystemExit) as ended:
        main(["oracle", str(tmp_path), "--runtime", "namespaces", "--json"])
    found = json.loads(capsys.readouterr().out)
    rows = {row.pop("name"): row for row in found["tasks"]}
    assert ended.value.code == 1 and found["counts"]["passes"] == 2
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "binary": "passes",
        "broken": "not run",
        "gpu": "refused",
        "lenient": "passes untouched",
        "none": "no solution",
        "right": "passes",
        "wrong": "fails",
    }
    assert (rows["right"]["untouched"], rows["right"]["solved"]) == (0.0, 1.0)
    assert rows["wrong"]["why"] == "it is wrong" and "gpus is not supported" in rows["gpu"]["why"]
    assert "RUN exit 3 ended with 3" in rows["broken"]["why"]
