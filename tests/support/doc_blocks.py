# SPDX-License-Identifier: Apache-2.0
"""The fenced blocks of README.md and docs/, as the pages show them.

A test marked `shown(page, *phrases)` is about the blocks of a page that have these phrases.  It
adds only what the page says that the reader has, and asserts what the page promises.  With `block`
it runs once for each, with `blocks` it gets all of them.
"""

import os
import re
import sys
import sysconfig
import textwrap
from typing import NamedTuple

import processes
from places import ROOT

FENCE = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SESSION = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of a page: what is between the fences, as far left as it goes."""

    page: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines that a reader types: those after "$ ", or all if there is none."""
        return [command for command, _ in self.session] or self.text.splitlines()

    @property
    def session(self) -> list[tuple[str, str]]:
        """Commands after "$ ", each with what it prints."""
        return SESSION.findall(self.text)


def block_with(page: str, phrase: str) -> Block:
    """Return the only block of a page that has a phrase."""
    texts = map(textwrap.dedent, FENCE.findall((ROOT / page).read_text()))
    (text,) = [text for text in texts if phrase in text]
    return Block(page, text)


def blocks_shown(node) -> list[Block]:
    """Return the blocks that a test's marks name."""
    marks = reversed([*node.iter_markers("shown")])
    return [
        block_with(page, phrase) for page, *phrases in (m.args for m in marks) for phrase in phrases
    ]


def is_shown(shown: str, printed: str) -> bool:
    """Return whether a page shows what was printed; a line of three dots stands for any lines."""
    parts = map(re.escape, shown.split("...\n"))
    return re.fullmatch("(?s:.*)".join(parts), printed) is not None


def reader(folder):
    """Make a folder the one that a reader works in: a checkout, as far as the pages name files."""
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def type_in(folder, command: str, seconds: float = 120) -> str:
    """Return what a command line prints that is typed into a shell in a folder."""
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    line = f"cd {folder} && {command}"
    done = processes.run(["bash", "-c", line], seconds, PATH=path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_script(folder, *parts: str, seconds: float = 300, **env) -> str:
    """Return what a script prints that is made of parts, and started in a folder."""
    script = folder / "script.py"
    script.write_text("\n".join(parts))
    command = f"cd {folder} && exec {sys.executable} {script}"
    done = processes.run(["bash", "-c", command], seconds, OMP_NUM_THREADS="1", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
