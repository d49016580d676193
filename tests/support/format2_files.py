# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of `format2_runs`, and how the zero8 that wrote them went on."""

import json
import shutil
import tarfile
from pathlib import Path

from places import GOLDEN

EXPECTED = json.loads((GOLDEN / "format2" / "expected.json").read_text())
"""By run and rank, what its `go_on` returned."""


def unpacked(saved: str | None, folder: Path) -> Path | None:
    """Return a copy of a checkpoint, in a folder, where nothing else has this name."""
    if saved is None:
        return None
    target, source = folder / "checkpoint" / saved, GOLDEN / saved
    archive = GOLDEN / "format2" / f"{saved}.tar.xz"
    if archive.exists():
        with tarfile.open(archive) as opened:
            # Python before 3.10.12 and 3.11.4 has no filters; the archives are our own.
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            opened.extractall(target, **safely)
    elif source.is_dir():
        shutil.copytree(source, target)
    else:
        target.parent.mkdir()
        shutil.copy(source, target)
    return target


def differences(got: list[dict], expected: list[dict]) -> list[str]:
    """Return which entries of which elements differ on which rank."""
    assert [list(rank) for rank in got] == [list(rank) for rank in expected]
    return [
        f"rank {number}, {elements}: {entry}"
        for number, rank in enumerate(expected)
        for elements, entries in rank.items()
        for entry in entries | got[number][elements]
        if got[number][elements].get(entry) != entries.get(entry)
    ]
