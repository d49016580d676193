# SPDX-License-Identifier: Apache-2.0
"""Which part of zero8 may import which: read off the sources, and off a fresh process."""

import ast
import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest
from places import ROOT

PACKAGE = ROOT / "zero8"

# A room imports from itself and from rooms in the lines above its own, not from its neighbours.  A
# new module or folder of zero8 has to be given its place here.
LAYERS = [
    {"environment", "spec"},
    {"files", "state", "op"},
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
    found = {n: outside & {t.partition(".")[0] for t in imported(p)} for n, p in SOURCES.items()}
    assert [name for name, targets in found.items() if targets] == []


def modules_imported() -> dict[str, set[str]]:
    """Return by module of zero8 the modules of zero8 that it imports, anywhere in its file."""
    modules = {name.removesuffix(".py").replace("/", "."): path for name, path in SOURCES.items()}
    found = {}
    for module, path in modules.items():
        inside = (t.removeprefix("zero8.") for t in imported(path) if t.startswith("zero8."))
        # `from zero8.a.b import c` imports the module zero8.a.b.c, or a name of zero8.a.b.
        names = {t if t in modules else t.rpartition(".")[0] for t in inside}
        found[module] = names & set(modules) - {module}
    return found


def test_layers_modules_import_no_circle():
    try:
        list(TopologicalSorter(modules_imported()).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {error.args[1]}")


def imports_deepspeed(path: Path) -> bool:
    return any(target.partition(".")[0] == "deepspeed" for target in imported(path))


def test_layers_deepspeed_is_imported_in_its_places_only():
    found = [name for name, path in SOURCES.items() if imports_deepspeed(path)]
    assert [name for name in found if not name.startswith(DEEPSPEED_ONLY_IN)] == []


def test_import_zero8_in_a_fresh_process_loads_neither_deepspeed_nor_cuda():
    code = (
        "import zero8; zero8.Adam8bitBlockwise; "
        "import sys, torch; "
        "assert not torch.cuda.is_initialized(), 'cuda'; "
        "assert 'deepspeed' not in sys.modules, 'deepspeed'; "
        "assert 'torch.utils.cpp_extension' not in sys.modules, 'slow'; "
        "assert 'torch.distributed.tensor' not in sys.modules, 'slow'; "
        "assert torch.optim.Adam8bitBlockwise is zero8.Adam8bitBlockwise"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT,
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        timeout=120,
    )
