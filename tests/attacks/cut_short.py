# SPDX-License-Identifier: Apache-2.0
"""A file that another process truncates while zero8 has it mapped into memory.

A read of a mapped page behind the end of the file ends a process by SIGBUS.  The command must end
with status 2 and a line that says what has happened.
"""

import os
from contextlib import suppress
from pathlib import Path

import psutil
from attack import Attack, main
from child_process import AS_A_PROGRAM, Answer, start
from crafted_files import dict_of, saved, state_dict, storage, tensor, value

MOMENT_FLOATS = 16 << 20
KEPT_BYTES = 8192


def large_file(command: str):
    """Return what makes a file with two moments of 64 MiB, and returns a command on it."""

    def plant(folder: Path) -> list[str]:
        entries, records = {"step": value(1)}, {}
        for which in ("exp_avg", "exp_avg_sq"):
            floats = storage("FloatStorage", which, MOMENT_FLOATS)
            entries[which] = tensor(floats, [4096, 4096], [4096, 1])
            records[which] = bytes(4 * MOMENT_FLOATS)
        (folder / "states.pt").write_bytes(saved(state_dict(dict_of(entries)), records))
        return [*AS_A_PROGRAM, "checkpoint", command, str(folder / "states.pt")]

    return plant


def cut_when_mapped(line: list[str], output: Path, seconds: float) -> Answer:
    """Run a command; truncate its file as soon as one of its processes has it mapped."""
    path, child = line[-1], start(line, output)
    process = psutil.Process(child.pid)
    while process.status() != psutil.STATUS_ZOMBIE and not child.is_over(seconds):
        if any(path in maps(one) for one in (process, *process.children(recursive=True))):
            os.truncate(path, KEPT_BYTES)
            break
    return child.answer(seconds)


def maps(process: psutil.Process) -> str:
    """Return what a process has mapped, as text."""
    with suppress(OSError):  # it has just ended
        return Path(f"/proc/{process.pid}/maps").read_text()
    return ""


def one_line(_: Path, answer: Answer) -> str:
    lines = answer.text.strip().splitlines()
    return "" if len(lines) == 1 else f"got {len(lines)} lines, expected one"


ATTACKS = tuple(
    Attack(
        command,
        large_file(command),
        (2,),
        ("cut short", "states.pt"),
        seconds=20,
        check=one_line,
        run=cut_when_mapped,
    )
    for command in ("verify", "inspect")
)

if __name__ == "__main__":
    main(ATTACKS)
