"""A small root file system with a shell, made of this machine's programs, for images in tests."""

import os
import re
import shutil
import subprocess
from pathlib import Path

PROGRAMS = (
    *("bash", "cat", "chmod", "cp", "find", "grep", "head", "id", "ln", "ls", "mkdir", "mkfifo"),
    *("mount", "mv", "rm", "rmdir", "sed", "seq", "setsid", "sh", "sleep", "touch", "unshare"),
    "yes",
)


def write_root(folder: Path, *more: str) -> None:
    """Write the programs, those in `more`, and the libraries that they need below `folder`."""
    needed = {path for name in (*PROGRAMS, *more) if (path := shutil.which(name))}
    for program in sorted(needed):
        listed = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        needed |= set(re.findall(r"(/\S+) \(0x", listed))
    for path in needed:
        name = path if "/lib" in path else f"/bin/{os.path.basename(path)}"
        (folder / name[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(path), folder / name[1:])
    for name in ("root", "tmp", "opt", "etc", "usr/bin", "lib", "lib64"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (folder / "tmp").chmod(0o1777)
