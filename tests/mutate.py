#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Breaks places of zero8/ and csrc/ drawn by a seed, one at a time, and looks whether a test fails.

`cover` runs every test file by itself, notes which lines it runs and for how long, and prints the
coverage; `kill` breaks places, and runs the test files that run each, short ones first, until one
fails.  It changes the checkout it stands in, and changes it back.
"""

import argparse
import ast
import json
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "mutate"
DATA, SECONDS = FOLDER / "coverage", FOLDER / "seconds.json"
COVERAGE = [sys.executable, "-m", "coverage"]
SELECTED = "not nightly and not multinode and not integrations"
LIMIT_S = 600  # of all tests of one place
ELSEWHERE = ("vec_neon.h", "step_neon.cpp", "team.h", "vec_thread.h")  # not run on this machine
# Each has its opposite beside it.
NAMES = "Lt LtE Gt GtE Eq NotEq Is IsNot In NotIn And Or Add Sub Mult FloorDiv".split()
SIGNS = "< <= > >= == != && || + -".split()
OPPOSITE = {getattr(ast, name): getattr(ast, NAMES[i ^ 1]) for i, name in enumerate(NAMES)}
IN_CXX = {f" {sign} ": f" {SIGNS[i ^ 1]} " for i, sign in enumerate(SIGNS)}


def broken(node: ast.AST) -> ast.AST | None:
    """Return what takes the place of an expression, None if it stays."""
    match node:
        case ast.Compare(left, [op], [right]):
            return ast.Compare(left, [OPPOSITE[type(op)]()], [right])
        case ast.BinOp(left, op, right) if type(op) in OPPOSITE:
            return ast.BinOp(left, OPPOSITE[type(op)](), right)
        case ast.BoolOp(op, values):
            return ast.BoolOp(OPPOSITE[type(op)](), values)
        case ast.Constant(int() as value) if not isinstance(value, bool):
            return ast.Constant(value + 1)
        case ast.Call(function, [first, second, *others], keywords):
            return ast.Call(function, [second, first, *others], keywords)
    return None


def places_in_python(path: Path) -> set[tuple]:
    """Return (path, line, first column, last column, new text) of a file's places."""
    functions = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.FunctionDef)]
    found = set()
    for node in (inner for x in functions for statement in x.body for inner in ast.walk(statement)):
        new = broken(node) if isinstance(node, ast.expr) else None
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise | ast.Return):
            node, new = node.test, ast.Constant(False)
        if new is not None and node.lineno == node.end_lineno:
            new = f"({ast.unparse(new)})"
            found.add((str(path), node.lineno, node.col_offset, node.end_col_offset, new))
    return found


def places_in_cxx(path: Path) -> set[tuple]:
    """Return the same of a file of csrc/; the first of each kind in a line."""
    found = set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code = line.split("//")[0]
        if re.match(r"\s*(#|template|static_assert)|.*[\"\\]", code):
            continue
        for old, new in IN_CXX.items():
            if (at := code.find(old)) >= 0:
                found.add((str(path), number, at, at + len(old), new))
        if whole := re.search(r"(?<![\w.])\d+(?![\w.])", code):
            found.add((str(path), number, *whole.span(), str(int(whole[0]) + 1)))
    return found


def draw(count: int, seed: int) -> list[tuple]:
    """Return places, three quarters of them in Python as of the lines."""
    python = set().union(*map(places_in_python, ROOT.glob("zero8/**/*.py")))
    sources = {*ROOT.glob("csrc/*.cpp"), *ROOT.glob("csrc/**/*.h")}
    cxx = set().union(*(places_in_cxx(path) for path in sources if path.name not in ELSEWHERE))
    rng, of_cxx = random.Random(seed), count // 4
    return rng.sample(sorted(python), count - of_cxx) + rng.sample(sorted(cxx), of_cxx)


def passes(file: str, *words: str) -> bool:
    """Return whether a test file passes, or has no test that runs here; words precede pytest's."""
    command = [sys.executable, *words, "-m", "pytest", "-qxm", SELECTED, file]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode in (0, 5)


def cover(file: str) -> float:
    """Run a test file under coverage; return how long it took."""
    began = time.monotonic()
    passed = passes(file, *COVERAGE[1:], "run", "-p", f"--context={file}", f"--data-file={DATA}")
    print(f"{(seconds := time.monotonic() - began):6.1f} s {file}{'' if passed else ' FAILED'}")
    return seconds


def kill(place: tuple, data: coverage.CoverageData, seconds: dict[str, float]) -> dict:
    """Break a place and return what it was, and the test file that failed."""
    path, number, first, last, new = place
    name, source = str(Path(path).relative_to(ROOT)), Path(path).read_text()
    lines = source.splitlines(keepends=True)
    line = lines[number - 1]
    lines[number - 1] = line[:first] + new + line[last:]
    folder = "tests/cuda/" if "cuda/" in name else "tests/kernel/"
    files = {file for file in seconds if file.startswith(folder)}
    if path.endswith(".py"):
        files = set(data.contexts_by_lineno(name).get(number, ())) & seconds.keys()
    deadline = time.monotonic() + LIMIT_S
    in_time = (file for file in sorted(files, key=seconds.get) if time.monotonic() < deadline)
    try:
        Path(path).write_text("".join(lines))
        killer = next((file for file in in_time if not passes(file)), None)
    finally:
        Path(path).write_text(source)
    row = {"place": f"{name}:{number}", "was": line[first:last], "is": new, "killed_by": killer}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["cover", "kill"])
    parser.add_argument("--places", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if chosen.command == "cover":
        files = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/*/test_*.py"))]
        with ThreadPoolExecutor(2) as pool:
            SECONDS.write_text(json.dumps(dict(zip(files, pool.map(cover, files), strict=True))))
        for words in (["combine", "-q"], ["report", "--sort=miss"]):
            subprocess.run([*COVERAGE, *words, f"--data-file={DATA}"], cwd=ROOT, check=True)
        return
    data, seconds = coverage.CoverageData(str(DATA)), json.loads(SECONDS.read_text())
    data.read()
    rows = [kill(place, data, seconds) for place in draw(chosen.places, chosen.seed)]
    print(f"{sum(row['killed_by'] is not None for row in rows)} of {len(rows)} places were noticed")


if __name__ == "__main__":
    main()
