# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that the sources use is in one table, and torch has it."""

import ast

import pytest
from places import ROOT

from zero8 import doctor
from zero8.doctor import TORCH_NAMES

SOURCES = sorted((ROOT / "zero8").rglob("*.py"))
OF_OBJECTS = {"_device_types", "_split_tensor"}
"""Attributes of torch's objects; the scan cannot see whose an attribute is."""


def is_private(part):
    return part.startswith("_") and not part.startswith("__")


def dotted(node):
    """Return the name that a chain of attributes spells, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    below = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{below}.{node.attr}" if below else ""


def private_names(path):
    """Return the private names of torch that a file imports, or spells out from `torch` on."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr in OF_OBJECTS:
            names = [f"torch.{node.attr}"]
        else:
            names = [dotted(node)] if isinstance(node, ast.Attribute) else []
        found |= {n for n in names if n.startswith("torch.") and any(map(is_private, n.split(".")))}
    # Of torch._C._x both torch._C and torch._C._x are found: the longest says all.
    return {n for n in found if not any(other.startswith(f"{n}.") for other in found)}


def of_object(name):
    return f"torch.{name.rpartition('.')[2]}"


def test_private_names_of_torch_in_the_sources_are_in_the_table():
    found = {name for path in SOURCES for name in private_names(path)}
    listed = {*TORCH_NAMES, *map(of_object, TORCH_NAMES)}
    assert found - listed == set()


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_private_name_is_in_the_installed_torch(name):
    assert doctor._is_there(name)
