# SPDX-License-Identifier: Apache-2.0
"""An attack: a crafted folder, a command on it, and the answer that zero8 should give.

A command runs in a fork: a crash or a hang is the fork's alone.  It must not print a traceback, and
what lies outside of its folder stays as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

from crafted import CHUNK, STEP, metadata
from forks import Forks

from zero8.files.tags import seal

OUTSIDE = "outside"
"""The name of a folder beside the crafted one that no command may change."""
IN_BLOCK = "in the block of saving"
"""What the command of `saving` prints when its block is entered."""
IMPORTS = """
import sys
import torch
from zero8 import cli
from zero8.checkpoint.commands import command
from zero8.files import tagged
torch.set_num_threads(1)  # a pool of threads would not survive a fork
"""


@dataclass(frozen=True)
class Attack:
    """One crafted folder, a command on it, and the expected answer."""

    name: str
    plant: Callable[[Path], str]
    statuses: tuple[int, ...] = (1,)
    says: tuple[str, ...] = ()
    stays: tuple[str, ...] = (OUTSIDE,)
    check: Callable[[Path, int, str], str] = lambda folder, status, text: ""

    def wrong(self, forks: Forks, folder: Path) -> list[str]:
        """Make the attack in a folder; return what is wrong with the answer, and the answer."""
        code = self.plant(folder)
        before = {name: _contents(folder / name) for name in self.stays}
        done: CompletedProcess = forks.run(code, seconds=10)
        text = done.stdout + done.stderr
        found = [
            f"{name} has changed" for name in before if _contents(folder / name) != before[name]
        ]
        if done.returncode not in self.statuses:
            found.append(f"got exit status {done.returncode}, expected one of {self.statuses}")
        found += ["got a traceback"] * ("Traceback" in text)
        found += [f"says nothing of {part!r}" for part in self.says if part not in text]
        found.append(self.check(folder, done.returncode, text))
        found = [*filter(None, found)]
        return [*found, text[-2000:]] if found else []


def checkpoint(*arguments: object) -> str:
    """Return the code of `zero8 checkpoint ...`."""
    words = ["checkpoint", *map(str, arguments)]
    return f"import sys\nfrom zero8 import cli\nsys.exit(cli.main({words!r}))"


def saving(tags: Path, tag: str, keep: int = 0) -> str:
    """Return the code that saves a tag; an OSError or ValueError ends it with status 1."""
    return f"""
import sys
from zero8.files import tagged
try:
    with tagged.saving({str(tags)!r}, {tag!r}, keep={keep}) as tag:
        print({IN_BLOCK!r}, flush=True)
        (tag / "states").write_bytes(b"new")
except (OSError, ValueError) as error:
    sys.exit(f"Error: {{error}}")
"""


def refused_first(_: Path, status: int, text: str) -> str:
    """Return what is wrong if the block of `saving` has been entered."""
    return "entered the block" if IN_BLOCK in text else ""


def outside(folder: Path) -> Path:
    """Return a file with contents in the folder that must not change."""
    path = folder / OUTSIDE / "precious"
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
    for name, data in ((".metadata", metadata()), ("__0_0.distcp", CHUNK), ("step.distcp", STEP)):
        (folder / name).write_bytes(data)
    return folder


def sealed(folder: Path) -> Path:
    """Return a new folder that is a small, whole checkpoint with a manifest."""
    seal(whole(folder))
    return folder


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
