# SPDX-License-Identifier: Apache-2.0
import re

from places import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text()
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text()


def test_pre_commit_versions_are_those_of_the_dev_extra():
    pinned = dict(re.findall(r'"(ruff|clang-format)==([\d.]+)"', PROJECT))
    hooks = re.findall(r"repo: .*/(?:mirrors-)?(ruff|clang-format)\S*\n +rev: v(\S+)\n", HOOKS)
    assert len(pinned) == 2
    assert dict(hooks) == pinned


def test_pre_commit_runs_the_style_checks_of_make_lint():
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    assert re.findall(r"id: (\S+)", HOOKS) == ["ruff-check", "ruff-format", "clang-format"]
    for command in ("ruff check", "ruff format", "clang-format"):
        assert command in lint
    style = "--style=file:csrc/.clang-format"
    assert style in lint and style in HOOKS
