# SPDX-License-Identifier: Apache-2.0
"""Recognizes the kind of a checkpoint."""

import os
from collections.abc import Callable
from pathlib import Path

from zero8.checkpoint.read.dcp_source import METADATA, read_dcp
from zero8.checkpoint.read.plain_source import read_plain
from zero8.checkpoint.read.safe_load import damage_in
from zero8.checkpoint.read.source import Source
from zero8.checkpoint.read.zero_source import STATES, read_zero
from zero8.files.tags import LATEST, folder_of, read_latest
from zero8.spec.shown import shown


def open_checkpoint(path: Path) -> Source:
    """Return the checkpoint at a path: of a file, its folder, its tag, or a folder of tags."""
    place, read = located(path)
    with damage_in(place):
        return read(place)


def located(path: Path) -> tuple[Path, Callable[[Path], Source]]:
    """Return the file or the folder of a checkpoint, and its reader; see `open_checkpoint`."""
    if path.is_file():
        return path, read_plain
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: not found")
    if os.path.lexists(path / METADATA):
        return path, read_dcp
    if any(STATES.fullmatch(file.name) for file in path.iterdir()):
        return path, read_zero
    if tag := read_latest(path):
        if found := folder_of(path, tag):
            return located(found)
        raise ValueError(f"{path / LATEST}: got {shown(tag)}, which is not a folder beside it")
    raise ValueError(
        f"{path}: not a checkpoint that zero8 knows; expected a file of torch.save, a folder of "
        "torch.distributed.checkpoint, or a DeepSpeed checkpoint with ZeRO states of zero8"
    )
