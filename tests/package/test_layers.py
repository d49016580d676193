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


def part_of(source: str) -> str:
    """Return the part that a file of zero8 belongs to, by its path in the package."""
    path = PurePosixPath(source).with_suffix("")
    places = [str(up) for up in (path, *path.parents) if any(str(up) in layer for layer in LAYERS)]
    assert len(places) == 1, f"zero8/{source}: expected one place in LAYERS, got {places}"
    return places[0]


def layer_of(part: str) -> int:
    (number,) = (number for number, layer in enumerate(LAYERS) if part in layer)
    return number


def source_of(target: str) -> str:
    """Return the file of zero8 that defines what is imported by a full name."""
    # `from zero8.a import b` imports the module zero8.a.b, or a name of zero8.a.
    *folders, name = target.split(".")[1:] or [""]
    while True:
        path = "/".join([*folders, name])
        for source in (f"{path}.py", f"{path}/__init__.py".removeprefix("/")):
            if source in SOURCES:
                return source
        *folders, name = folders or [""]


def points_up(source: str, target: str) -> bool:
    part, below = part_of(source), part_of(source_of(target))
    return below != part and layer_of(below) >= layer_of(part)


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
