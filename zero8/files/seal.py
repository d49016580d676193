# SPDX-License-Identifier: Apache-2.0
"""Manifests for folders of other writers: DCP, torch.save, a conversion."""

import os
from pathlib import Path

from zero8.files.atomic import sync_folder
from zero8.files.hashes import Progress, hash_of
from zero8.files.inside import opened
from zero8.files.manifest import Damage, File, Manifest, paths_in
from zero8.files.tags import INCOMPLETE, end, next_sequence, tag_at


def seal(folder: Path, progress: Progress | None = None, force: bool = False) -> Manifest:
    """Write the manifest of all files in a folder, which makes it complete.

    To be called by one process, after all have written.  Costs one read of all files, mostly from
    the page cache.  The manifest has world size 0 and rank 0 for all files, as the writers are
    unknown.

    Args:
        folder: the folder.
        progress: called with the numbers of bytes read.
        force: whether to seal even a folder that is marked as incomplete.

    Raises:
        ValueError: if a save into the folder, or its deletion, was interrupted; if it holds
            something other than files, such as a link or a pipe; if a tag beside it has the
            largest sequence number.
        OSError: if a file cannot be read, or the manifest cannot be written.
    """
    folder = Path(folder)
    if not force and tag_at(folder).state == INCOMPLETE:
        raise ValueError(
            f"{folder}: is incomplete: saving or deleting it was interrupted, so that files may be "
            "missing; to seal it anyway, use --force (force=True)"
        )
    sequence = next_sequence(folder.resolve().parent)
    files = [file_entry(folder, path, 0, progress) for path in paths_in(folder)]
    for parent in {folder, *(Path(folder, file.path).parent for file in files)}:
        sync_folder(parent)
    manifest = Manifest.of(sequence, 0, files)
    end(folder, manifest)
    return manifest


def file_entry(folder: Path, path: str, rank: int, progress: Progress | None = None) -> File:
    """Sync a file to the disk, and return its entry in a manifest."""
    with opened(folder, path) as file:
        os.fsync(file.fileno())
        return File(path, os.fstat(file.fileno()).st_size, hash_of(file, progress), rank)


def verify(folder: Path, progress: Progress | None = None) -> Manifest:
    """Compare a folder with its manifest, which is returned; costs one read of all files.

    Raises:
        FileNotFoundError: if there is no manifest: the folder was not sealed.
        ValueError: if anything in the folder differs; the message lists it.
    """
    manifest = Manifest.read(folder)
    if damages := manifest.check(folder, progress=progress):
        raise ValueError(f"{folder} is damaged:\n{lines(damages)}")
    return manifest


def lines(damages: list[Damage], most: int = 20) -> str:
    """Return a line for each damage, up to `most`."""
    shown = [f"  {damage}" for damage in damages[:most]]
    if len(damages) > most:
        shown.append(f"  and {len(damages) - most} more")
    return "\n".join(shown)
