# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/format2 by the last zero8 whose states are of format 2, commit 57aad96.

The archives are checkpoints of the runs in tests/support/format2_runs.py, and `expected.json` says
how that zero8 itself went on from them, and from older files in tests/golden.  They stand for the
checkpoints that users have, so this is not run again.  They were written by

    git worktree add --detach ../zero8-format2 57aad96
    cd ../zero8-format2
    make setup
    OMP_NUM_THREADS=1 .venv/bin/python ../zero8/tests/golden/write_format2.py

with torch 2.13, DeepSpeed 0.19.8 and libaio-dev; ../zero8 is the checkout of this file.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent
OURS, THEIRS = GOLDEN.parent / "support", Path.cwd() / "tests" / "support"
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""What DeepSpeed puts beside checkpoints."""


def on_ranks(function: str, name: str, world_size: int, path: Path | None, work: Path) -> list:
    """Run a function of format2_runs.py in processes of its own; return what the ranks returned."""
    import format2_runs
    from ranks import run_ranks

    if not world_size:
        return [getattr(format2_runs, function)(name, path)]
    return run_ranks(
        getattr(format2_runs, function), world_size, work, timeout_s=1500, name=name, path=path
    )


def write_universal(folder: Path) -> None:
    """Convert a golden checkpoint of ZeRO-2."""
    shutil.copytree(GOLDEN / "zero2_checkpoint", folder)
    command = [sys.executable, "-m", "zero8.cli", "checkpoint", "universal", folder]
    subprocess.run([*command, "--workers", "1"], check=True, timeout=300)
    shutil.rmtree(folder / "step3")
    (folder / "latest").unlink()


def pack(folder: Path, target: Path) -> None:
    """Write the files of a checkpoint into an archive that holds nothing but their contents."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return None if Path(info.name).name in SCRIPTS else info

    with tarfile.open(target, "w:xz", preset=9) as archive:
        archive.add(folder, arcname=".", filter=plain)


def main() -> None:
    """Write all archives, then go on from each checkpoint in new processes."""
    from format2_runs import ALL

    from zero8.state.header import FORMAT_VERSION

    if FORMAT_VERSION != 2:
        sys.exit(f"this zero8 writes format {FORMAT_VERSION}: run it where its docstring says")
    target, expected = GOLDEN / "format2", {}
    target.mkdir()
    with tempfile.TemporaryDirectory() as work:
        place = Path(work)
        write_universal(place / "universal" / "checkpoint")
        for name, run in ALL.items():
            if run.save:
                folder = place / run.saved / "checkpoint"
                folder.mkdir(parents=True)
                on_ranks("save", name, run.world_size, folder, place)
        for folder in place.glob("*/checkpoint"):
            pack(folder, target / f"{folder.parent.name}.tar.xz")
        for name, run in ALL.items():
            written = place / (run.saved or "") / "checkpoint"
            path = written if written.exists() else run.saved and GOLDEN / run.saved
            expected[name] = on_ranks("go_on", name, run.world_size, path, place)
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    # What both trees have is taken from the old one.
    sys.path[:1] = [str(THEIRS), str(OURS)]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (THEIRS, OURS)))
    main()
