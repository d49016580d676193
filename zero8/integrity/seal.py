# SPDX-License-Identifier: Apache-2.0
"""Manifests for folders that something else has written: DCP, torch.save, a conversion."""

from pathlib import Path

from zero8.integrity.files import Progress, hash_of, sync_file, sync_folder
from zero8.integrity.manifest import Damage, File, Manifest, paths_in
from zero8.integrity.tags import end, next_sequence


def seal(folder: Path, progress: Progress | None = None) -> Manifest:
    """Write the manifest of all files in a folder; one process does, when all have written.

    Costs one read of all files, mostly from the page cache.

    Args:
        folder: to be complete from now on.
        progress: called with the numbers of bytes read.
    """
    folder = Path(folder)
    files = [file_entry(folder, path, 0, progress) for path in paths_in(folder)]
    for parent in {folder, *(Path(folder, file.path).parent for file in files)}:
        sync_folder(parent)
    manifest = Manifest.of(next_sequence(folder.resolve().parent), 1, files)
    end(folder, manifest)
    return manifest


def file_entry(folder: Path, path: str, rank: int, progress: Progress | None = None) -> File:
    """Return a file's entry in a manifest, when its contents are on the disk."""
    whole = Path(folder, path)
    sync_file(whole)
    return File(path, whole.stat().st_size, hash_of(whole, progress), rank)


def verify(folder: Path, progress: Progress | None = None) -> Manifest:
    """Return the manifest of a folder; costs one read of all its files.

    Raises:
        FileNotFoundError: if there is no manifest: the folder was not sealed, or not in whole.
        ValueError: if anything in the folder is not what it was; the message lists it all.
    """
    manifest = Manifest.read(folder)
    if damages := manifest.check(folder, progress=progress):
        raise ValueError(f"{folder} is damaged:\n{lines(damages)}")
    return manifest


def lines(damages: list[Damage], most: int = 20) -> str:
    """Return a line for each damage, up to so many."""
    told = [f"  {damage}" for damage in damages[:most]]
    if len(damages) > most:
        told.append(f"  and {len(damages) - most} more")
    return "\n".join(told)
