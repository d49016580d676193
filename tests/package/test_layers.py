# SPDX-License-Identifier: Apache-2.0
"""Which part of zero8 may import which, read off the sources."""

import ast
from pathlib import Path, PurePosixPath

from places import ROOT

PACKAGE = ROOT / "zero8"

# A room imports from itself and from rooms in the lines above its own, not from its neighbours.  A
# new module or folder of zero8 has to be given its place here.
LAYERS = [
    {"environment", "spec"},
    {"op"},
    {"files", "state"},
    {"deepspeed"},
    {"optimizer"},
    {"checkpoint", "autoload"},
    {"__init__"},
    {"integrations", "bench", "doctor", "plan"},
    {"cli"},
    {"__main__"},
]
DEEPSPEED_ONLY_IN = ("deepspeed/", "checkpoint/write/universal_writer.py", "bench.py", "doctor.py")
SOURCES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path: Path) -> set[str]:
    """Return the full names of all modules, and names in modules, that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def packages(path: Path) -> set[str]:
    return {target.partition(".")[0] for target in imported(path)}


def layers_of(path: PurePosixPath) -> list[tuple[int, str]]:
    """Return the layer and the part that a file or a name in it belongs to, by its path."""
    ups = {str(up) for up in (path, *path.parents)}
    return [(number, part) for number, layer in enumerate(LAYERS) for part in layer & ups]


def points_up(source: str, target: str) -> bool:
    found = layers_of(PurePosixPath(source).with_suffix(""))
    assert len(found) == 1, f"zero8/{source}: expected one place in LAYERS, got {found}"
    # What is in no module is a name of zero8 itself.
    below = layers_of(PurePosixPath(*target.split(".")[1:])) or layers_of(PurePosixPath("__init__"))
    return below != found and below[0][0] >= found[0][0]


def test_layers_imports_point_to_lower_layers():
    assert [
        f"{source} imports {target}"
        for source, path in SOURCES.items()
        for target in imported(path)
        if target.partition(".")[0] == "zero8" and points_up(source, target)
    ] == []


def test_layers_package_imports_nothing_that_is_not_installed_with_it():
    outside = {"benchmarks", "examples", "launch", "tests"}
    assert [name for name, path in SOURCES.items() if outside & packages(path)] == []


def test_layers_deepspeed_is_imported_in_its_places_only():
    found = [name for name, path in SOURCES.items() if "deepspeed" in packages(path)]
    assert [name for name in found if not name.startswith(DEEPSPEED_ONLY_IN)] == []
