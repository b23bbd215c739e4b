"""Write a distribution with entry points, as pip installs it: a folder beside its modules."""

from collections.abc import Mapping
from pathlib import Path


def add_distribution(
    folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]]
) -> None:
    """Write the metadata of a distribution into a folder of `sys.path`.

    `entry_points` has, by group and name, what each names, such as `module:attribute`.
    """
    info = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
