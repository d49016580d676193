# SPDX-License-Identifier: Apache-2.0
"""What all scripts of this folder share: an attack, and whether zero8 answers it as it should."""

import importlib
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import torch
from child_process import Answer, answer_of
from crafted_cases import CHUNK, STEP, metadata

from zero8.files.tags import seal

MAX_SECONDS, MAX_MIB = 10.0, 500
OUTSIDE = "outside"
"""The name of a folder beside the crafted one that no command may change."""
IN_BLOCK = "in the block of saving"
"""What the command of `saving` prints when its block is entered."""


@dataclass(frozen=True)
class Attack:
    """One crafted folder, a command on it, and the expected answer.

    Attributes:
        name: unique in its script.
        plant: makes the crafted files in a new folder and returns the command line.
        statuses: the exit statuses that are right.
        says: texts that the output must have.
        stays: paths in the new folder that must be the same afterwards.
        seconds, mib: limits.
        check: given the folder and the answer, returns what else is wrong, "" if nothing is.
        run: runs the command, given a file for its output and the time limit.
    """

    name: str
    plant: Callable[[Path], list[str]]
    statuses: tuple[int, ...] = (1,)
    says: tuple[str, ...] = ()
    stays: tuple[str, ...] = (OUTSIDE,)
    seconds: float = MAX_SECONDS
    mib: int = MAX_MIB
    check: Callable[[Path, Answer], str] = lambda folder, answer: ""
    run: Callable[[list[str], Path, float], Answer] = answer_of


def checkpoint(*arguments: object) -> list[str]:
    """Return the command line `zero8 checkpoint ...`."""
    return ["zero8", "checkpoint", *map(str, arguments)]


def python(code: str, **values: object) -> list[str]:
    """Return the command line that runs Python code, in which {names} stand for values.

    An OSError or ValueError of the code ends it with status 1 and one line, as zero8's commands do.
    """
    body = "".join(f"    {line}\n" for line in code.strip().format(**values).splitlines())
    ending = (
        "except (OSError, ValueError) as error:\n    sys.exit(f'{type(error).__name__}: {error}')"
    )
    return ["python", "-c", f"import sys\ntry:\n{body}{ending}\n"]


def saving(folder: Path, tag: str, keep: int = 0) -> list[str]:
    """Return the command line that saves a tag by `zero8.files.tagged.saving`."""
    code = """
from zero8.files import tagged
with tagged.saving({folder!r}, {tag!r}, keep={keep}) as tag:
    print({block!r}, flush=True)
    (tag / "states").write_bytes(b"new")
"""
    return python(code, folder=str(folder), tag=tag, keep=keep, block=IN_BLOCK)


def outside(folder: Path, name: str = "precious") -> Path:
    """Return a file with contents in the folder that must not change."""
    path = folder / OUTSIDE / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious\n")
    return path


def made(folder: Path) -> Path:
    """Return a new folder."""
    folder.mkdir(parents=True)
    return folder


def whole(folder: Path) -> Path:
    """Return a new folder that is a small, whole checkpoint of torch.distributed.checkpoint."""
    made(folder)
    for name, data in (
        (".metadata", metadata()),
        ("__0_0.distcp", CHUNK),
        ("step.distcp", STEP),
    ):
        (folder / name).write_bytes(data)
    return folder


def sealed(folder: Path) -> Path:
    """Return a new folder that is a small, whole checkpoint with a manifest."""
    seal(whole(folder))
    return folder


# --- Attacks -------------------------------------------------------------------------------------


def attempt(attack: Attack, folder: Path) -> tuple[list[str], Answer, list[str]]:
    """Make an attack in a new folder; return the command line, its answer, and what is wrong."""
    line = attack.plant(made(folder))
    before = {name: _contents(folder / name) for name in attack.stays}
    answer = attack.run(line, folder / "output", attack.seconds)
    changed = [name for name in attack.stays if _contents(folder / name) != before[name]]
    return line, answer, _wrong_with(attack, folder, answer, changed)


def _wrong_with(attack: Attack, folder: Path, answer: Answer, changed: list[str]) -> list[str]:
    wrong = [f"{name} has changed" for name in changed]
    if answer.status is None:
        wrong.append(f"did not end within {attack.seconds:g} s")
    elif answer.status not in attack.statuses:
        wrong.append(f"got exit status {answer.status}, expected one of {attack.statuses}")
    if "Traceback" in answer.text:
        wrong.append("got a traceback, expected a message")
    if answer.mib > attack.mib:
        wrong.append(f"took {answer.mib} MiB, expected at most {attack.mib}")
    wrong += [f"says nothing of {text!r}" for text in attack.says if text not in answer.text]
    if answer.status is not None and (more := attack.check(folder, answer)):
        wrong.append(more)
    return wrong


def _contents(path: Path) -> dict[str, object]:
    """Return what there is at a path: folders, links, and files with their contents."""
    found: dict[str, object] = {}
    for one in [path, *sorted(path.rglob("*"))]:
        name = str(one.relative_to(path))
        if one.is_symlink():
            found[name] = one.readlink()
        elif one.is_file():
            found[name] = one.read_bytes()
        else:
            found[name] = "another kind" if one.exists() and not one.is_dir() else one.is_dir()
    return found


def _shown(line: list[str]) -> str:
    """Return a command line as one would type it."""
    if line[:2] == ["python", "-c"]:
        return f"python - <<END\n{line[2]}END"
    return shlex.join(line)


def _report(attack: Attack, line: list[str], answer: Answer, wrong: list[str]) -> str:
    """Return how an attack went, for people."""
    lines = [
        attack.name,
        f"  $ {_shown(line)}",
        f"  status {answer.status} after {answer.seconds:.1f} s, {answer.mib} MiB",
        *(f"  | {text[:300]}" for text in answer.text.splitlines()[-8:]),
        *(f"  WRONG: {one}" for one in wrong),
    ]
    return "\n".join(lines if wrong else [*lines, "  as expected"]) + "\n"


def work(cases: Sequence[Sequence[str]], folder: Path) -> None:
    """Make attacks, given as script and name; print for each a line of JSON, of how it went."""
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    for number, (script, name) in enumerate(cases):
        (attack,) = (one for one in importlib.import_module(script).ATTACKS if one.name == name)
        with redirect_stdout(sys.stderr):  # which DeepSpeed logs to from its import on
            line, answer, wrong = attempt(attack, folder / str(number))
        shutil.rmtree(folder / str(number))
        how = {"wrong": wrong, "command": _shown(line), **asdict(answer)}
        print(json.dumps([script, name, how]), flush=True)


def main(attacks: Sequence[Attack]) -> None:
    """Make the attacks of a script, print how each went, and exit with 1 if one went wrong."""
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    failed = 0
    with ExitStack() as stack:
        if len(sys.argv) > 1:
            Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
            made_in = tempfile.mkdtemp(prefix="attacks-", dir=Path(sys.argv[1]).absolute())
        else:
            made_in = stack.enter_context(tempfile.TemporaryDirectory())
        for number, attack in enumerate(attacks):
            folder = Path(made_in, str(number))
            line, answer, wrong = attempt(attack, folder)
            failed += bool(wrong)
            print(_report(attack, line, answer, wrong), flush=True)
    sys.exit(bool(failed))
