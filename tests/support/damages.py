# SPDX-License-Identifier: Apache-2.0
"""Damages of files."""

import os
from pathlib import Path

import torch


def flip(path: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Take away the last bytes, as many as a disk sector has."""
    os.truncate(path, path.stat().st_size - 4096)


def edited(change):
    """Return what changes the content of a file of torch.save by a function."""

    def damage(path):
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)

    return damage
