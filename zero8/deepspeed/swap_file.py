# SPDX-License-Identifier: Apache-2.0
"""The file that holds the optimizer state of one ZeRO-3 sub-group on a local disk.

It is a file of `torch.save`: a dict of the state's entries, with moments as they are pickled in any
checkpoint (`zero8.deepspeed.moment_tensor`), and `hash`, the 64-bit XXH3 of all that the hashes of
the moments do not cover, and of these.  It detects damage and misplaced writes.

DeepSpeed numbers the files from a counter of the process, so two jobs with one `nvme_path` use the
same names, while engines of one process do not.  So a process locks its folder until it ends, in
any way.  The lock lies beside the folder, whose files DeepSpeed copies into every checkpoint.
"""

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.serialization import config

from zero8.deepspeed.moment_tensor import (
    HEADER,
    MomentTensor,
    is_pickled_moment,
    pickled,
    with_moments,
)
from zero8.environment import flock
from zero8.files.manifest import hash_64

HASH = "hash"


class Mark(NamedTuple):
    """What tells a file from any other."""

    step: int
    hash: int


def save(path: str, state: Mapping[str, Any]) -> Mark:
    """Write a state over a file, whose disk blocks stay its own; return its mark."""
    saved = {k: pickled(x) if isinstance(x, MomentTensor) else x for k, x in state.items()}
    saved[HASH] = hash_of(saved)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with open(descriptor, "r+b") as file, config.patch("save.compute_crc32", False):
            torch.save(saved, file)
            file.truncate()
    except RuntimeError as error:  # torch's, of an error in a write
        if isinstance(error.__context__, OSError):
            raise _named(error.__context__, path) from error
        raise
    except OSError as error:
        raise _named(error, path) from error
    return Mark(saved["step"], saved[HASH])


def load(path: str, expected: Mark | None = None) -> dict[str, Any]:
    """Return the state in a file; `expected` is the mark of what was written last.

    Raises ValueError with the file's name if it is damaged, or not what was written last.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        state, mark = checked(saved), Mark(saved["step"], saved[HASH])
    except Exception as error:  # torch's reader raises many classes of damaged files
        if isinstance(error, OSError) and error.filename:
            raise
        message = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path}: damaged or cut short: {message}") from error
    if expected not in (None, mark):
        raise ValueError(
            f"{path}: it is whole, but of step {mark.step} and not what this run wrote last, at "
            f"step {expected.step}: a write failed, or another program writes there"
        )
    return state


def checked(saved: object) -> dict[str, Any]:
    """Return the state in what `torch.load` has read; raise ValueError if it is damaged."""
    if not isinstance(saved, dict) or HASH not in saved:
        raise ValueError("not a file of 8-bit optimizer states")
    state = with_moments(saved)
    if state.pop(HASH) != hash_of(saved):
        raise ValueError("its hash is wrong: a write or a read of it failed, or it was changed")
    return state


_locked: dict[Path, FileIO] = {}


def lock(folder: str) -> None:
    """Lock a folder for this process; raise OSError, with its holder, if another has the lock."""
    path = Path(f"{Path(folder).resolve()}.flock")
    if path in _locked:
        return
    file = flock.opened(path)
    if not flock.take_where_possible(file):
        with file:
            raise OSError(
                errno.EBUSY,
                f"in use: {flock.holder(file)} keeps its optimizer states there; give each job an "
                "nvme_path of its own",
                folder,
            )
    _locked[path] = file


def reserve(path: str, num_bytes: int) -> None:
    """Allocate disk blocks for a file, so that writing this many bytes cannot find the disk full.

    Raises OSError if there is no room; it names the file.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < num_bytes:
            os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        raise _named(error, path, f": {num_bytes} bytes are needed") from error
    finally:
        os.close(descriptor)


def will_need(path: str) -> None:
    """Have the kernel begin to read a file; a missing one is an error when it is read."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def hash_of(saved: Mapping[str, Any]) -> int:
    """Return the hash of a file's contents, except of the buffers of moments."""
    entries = {k: x[HEADER] if is_pickled_moment(x) else x for k, x in saved.items() if k != HASH}
    tensors = {k: x.contiguous() for k, x in entries.items() if isinstance(x, Tensor)}
    text = repr([(k, list(x.shape) if k in tensors else x) for k, x in entries.items()])
    return hash_64([text.encode(), *(x.view(torch.uint8).numpy() for x in tensors.values())])


def _named(error: OSError, path: str, needed: str = "") -> OSError:
    free = os.statvfs(Path(path).parent)
    problem = f"{error.strerror}{needed}: {free.f_bavail * free.f_frsize} bytes are free"
    return OSError(error.errno, problem, path)
