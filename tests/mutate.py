#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Breaks places of zero8/ and csrc/ drawn by a seed, one at a time, and looks whether a test fails.

`cover` runs every test file by itself, notes which lines it runs and for how long, and prints the
coverage; `kill` breaks places, and runs the test files that run each, short ones first, until one
fails or takes too long.  The places are in lines that stand once, with --beside also in another
checkout, where they are the same.  It changes its checkout, and changes it back.  TESTS in the
environment selects tests, as pytest's -m does.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[1]
DATA, SECONDS = ROOT / "runs" / "coverage", ROOT / "runs" / "seconds.json"
COVERAGE = [sys.executable, "-m", "coverage"]
TESTS = os.environ.get("TESTS", "not nightly and not multinode and not integrations")
LIMIT_S = 600  # of all tests of one place
ELSEWHERE = ("vec_neon.h", "step_neon.cpp", "team.h", "vec_thread.h")  # not run on this machine
# What is broken, in either language: an operator, whose opposite stands beside it; a guard that
# returns or raises; two arguments; a number.
SIGNS = "< <= > >= == != && || and or + -".split()
RULES = [(re.escape(f" {old} "), f" {SIGNS[i ^ 1]} ") for i, old in enumerate(SIGNS)] + [
    (r"(?<=\bif ).+(?=:\n +(return|raise)\b)", "False"),
    (r"(?<=\bif \().+(?=\) (return|throw|\{\n +(return|throw))\b)", "false"),
    (r"(?<=\()([\w.]+), ([\w.]+)(?=[,)])", r"\2, \1"),
    (r"(?<![\w.])(\d+)(?![\w.])", r"\1 + 1"),
    (r" is not ", " is "),
    (r" not in ", " in "),
]


def code(source: str, suffix: str) -> set[int]:
    """Return the lines of a file that do something: in Python, those of functions."""
    if suffix != ".py":
        quiet = re.compile(r"\s*(#|//|template|static_assert)")
        return {i for i, line in enumerate(source.splitlines(), 1) if not quiet.match(line)}
    functions = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef)]
    inner = {y for x in functions for statement in x.body for y in ast.walk(statement)}
    return {x.lineno for x in inner if isinstance(x, ast.expr) and not isinstance(x, ast.Constant)}


def places(root: Path, suffix: str) -> dict[tuple, tuple]:
    """Return a checkout's places in a language by text: (path, first, last, new text)."""
    by_text = defaultdict(list)
    for path in sorted(x for room in ("zero8", "csrc") for x in (root / room).rglob("*")):
        if path.suffix not in (suffix, suffix.replace("cpp", "h")) or path.name in ELSEWHERE:
            continue
        source = path.read_text()
        lines, numbers = source.splitlines(), code(source, suffix)
        for rule, new in RULES:
            for match in re.finditer(rule, source):
                before = source[: match.start()].splitlines()
                line = lines[len(before) - 1]
                comment_or_text = re.search(r"#|//", before[-1]) or before[-1].count('"') % 2
                if len(before) in numbers and not comment_or_text:
                    text = (line.strip(), len(line) - len(before[-1]), new)
                    by_text[text].append((path, *match.span(), match.expand(new)))
    return {text: alike[0] for text, alike in by_text.items() if len(alike) == 1}


def draw(count: int, seed: int, beside: Path) -> list[tuple]:
    """Return places, three quarters of them in Python as of the lines."""
    rng, drawn = random.Random(seed), []
    for suffix, share in ((".py", count - count // 4), (".cpp", count // 4)):
        here = places(ROOT, suffix)
        texts = rng.sample(sorted(here.keys() & places(beside, suffix).keys()), share)
        drawn += [here[text] for text in texts]
    return drawn


def passes(file: str, *words: str) -> bool:
    """Return whether a test file passes, or has no test that runs here; words precede pytest's."""
    command = ["timeout", f"{LIMIT_S}", sys.executable, *words, "-m", "pytest", "-qxm", TESTS, file]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode in (0, 5)


def cover(file: str) -> float | None:
    """Run a test file under coverage; return how long it took, None if it fails as it is."""
    began = time.monotonic()
    passed = passes(file, *COVERAGE[1:], "run", "-p", f"--context={file}", f"--data-file={DATA}")
    print(f"{(seconds := time.monotonic() - began):6.1f} s {file}{'' if passed else ' FAILED'}")
    return seconds if passed else None


def kill(place: tuple, data: coverage.CoverageData, seconds: dict) -> bool:
    """Break a place; print and return whether a test file fails."""
    path, first, last, new = place
    name, source = str(path.relative_to(ROOT)), path.read_text()
    number = source.count("\n", 0, first) + 1
    folder = "tests/cuda/" if "cuda/" in name else "tests/kernel/"
    ran = set(data.contexts_by_lineno(name).get(number, ())) & seconds.keys()
    ran |= {x for x in seconds if path.suffix != ".py" and x.startswith(folder)}
    until = time.monotonic() + LIMIT_S
    in_time = (x for x in sorted(ran, key=seconds.get) if time.monotonic() < until)
    try:
        path.write_text(source[:first] + new + source[last:])
        killer = next((file for file in in_time if not passes(file)), None)
    finally:
        path.write_text(source)
    what = {"place": f"{name}:{number}", "was": source[first:last], "is": new, "noticed_by": killer}
    print(json.dumps(what), flush=True)
    return killer is not None


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["cover", "kill"])
    parser.add_argument("--places", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside", type=Path, default=ROOT, help="another checkout")
    chosen = parser.parse_args()
    DATA.parent.mkdir(exist_ok=True)
    if chosen.command == "kill":
        data, seconds = coverage.CoverageData(str(DATA)), json.loads(SECONDS.read_text())
        data.read()
        drawn = draw(chosen.places, chosen.seed, chosen.beside)
        noticed = [kill(place, data, seconds) for place in drawn]
        print(f"{sum(noticed)} of {len(noticed)} places were noticed")
        return
    files = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/*/test_*.py"))]
    with ThreadPoolExecutor(2) as pool:
        took = dict(zip(files, pool.map(cover, files), strict=True))
    SECONDS.write_text(json.dumps({file: took[file] for file in files if took[file]}))
    for words in (["combine", "-q"], ["report", "--sort=miss"]):
        subprocess.run([*COVERAGE, *words, f"--data-file={DATA}"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
