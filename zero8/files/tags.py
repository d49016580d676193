# SPDX-License-Identifier: Apache-2.0
"""The tags of a folder of checkpoints: which of them are complete, which is the newest.

A tag is a folder, and not a link to one.  It is complete if it has a manifest, with or without a
marker.  With a marker alone, a save or a deletion was interrupted.  With neither, it was saved
without zero8, and its state is unknown.  Steps, in order:

    save      write marker, remove old manifest, write files, write manifest, remove marker
    delete    write marker, remove manifest, remove files, remove marker

Tags are ordered by their sequence numbers, not by clocks.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from zero8.environment import flock
from zero8.files.atomic import sync_folder, write_atomically
from zero8.files.inside import is_folder, leads_out, opened, read_at_most, remove
from zero8.files.manifest import (
    MANIFEST,
    MARKER,
    Damage,
    File,
    Manifest,
    hash_of,
    paths_in,
)

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
"""Files beside tags that name the tag to load, and the universal checkpoint to load."""
LOCK = ".zero8_lock"
LIMIT_BYTES = 4096

COMPLETE, INCOMPLETE, UNVERIFIED, DAMAGED = "complete", "incomplete", "unverified", "damaged"


class Tag(NamedTuple):
    """A tag, without its files: its name, state, and sequence number, 0 if unknown.

    COMPLETE; INCOMPLETE: saving or deleting it was interrupted; UNVERIFIED: saved without zero8;
    DAMAGED: its manifest cannot be read, for a problem in words.
    """

    name: str
    state: str
    sequence: int
    problem: str = ""


def tag_at(folder: Path) -> Tag:
    """Return the tag at an existing folder."""
    folder = Path(folder)
    try:
        return Tag(folder.name, COMPLETE, Manifest.read(folder).sequence)
    except FileNotFoundError:
        if not os.path.lexists(folder / MARKER):
            return Tag(folder.name, UNVERIFIED, 0)
    except (OSError, ValueError) as error:
        return Tag(folder.name, DAMAGED, 0, str(error))
    sequence = _marker(folder).get("sequence")
    if not (type(sequence) is int and sequence >= 0):
        sequence = 0  # it only orders tags
    return Tag(folder.name, INCOMPLETE, sequence)


def tags_in(folder: Path) -> list[Tag]:
    """Return the tags of a folder, sorted by sequence number."""
    found = [tag_at(path) for path in Path(folder).iterdir() if is_folder(path)]
    return sorted(found, key=lambda tag: (tag.sequence, tag.name))


def complete_tags(folder: Path) -> list[Tag]:
    """Return the complete tags of a folder, the newest last."""
    return [tag for tag in tags_in(folder) if tag.state == COMPLETE]


def whole_tags(folder: Path) -> list[Tag]:
    """Return the complete tags whose files are all there with their sizes, the newest last."""
    paths = {tag: Path(folder, tag.name) for tag in complete_tags(folder)}
    return [tag for tag, path in paths.items() if Manifest.read(path).is_there(path)]


def next_sequence(folder: Path) -> int:
    """Return the sequence number for the next tag."""
    return 1 + max((tag.sequence for tag in tags_in(folder)), default=0)


def begin(
    folder: Path, sequence: int, note: str = "", is_part: Callable[[str], bool] = lambda path: True
) -> None:
    """Mark a new or existing tag incomplete, and delete the files of its earlier save, if any.

    Files of a tag that was saved without zero8 stay, and those that are no part of a save, which
    `is_part` says of a path.  `note` is kept in the marker.  If the tag is a link, or has one in
    place of a part, through which the save would write, it raises ValueError, and nothing is
    changed.
    """
    if folder.is_symlink():
        raise ValueError(
            f"{folder}: got a symbolic link, expected a folder for the tag; remove it, or name "
            "another tag"
        )
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent)
    present = list(paths_in(folder))
    for path in present:  # a link may be in the place of a folder of parts, too
        if (is_part(path) or is_part(f"{path}/")) and os.path.islink(folder / path):
            raise ValueError(
                f"{folder / path}: got a symbolic link in the folder of a tag that is to be saved, "
                "expected none; remove it"
            )
    was_ours = tag_at(folder).state != UNVERIFIED
    _make_incomplete(folder, sequence, note)
    for path in present if was_ours else ():
        if is_part(path):
            remove(folder, path)
    for parent, _, _ in os.walk(folder, topdown=False):  # DeepSpeed requires some not to exist
        with suppress(OSError):  # not empty
            os.rmdir(parent)


def abandon(folder: Path) -> None:
    """Remove the marker of a tag that will get no manifest, which makes it unverified."""
    (folder / MARKER).unlink(missing_ok=True)


def note_of(folder: Path) -> str | None:
    """Return the note in the marker of a tag, None without a marker."""
    return _marker(folder).get("note")


def end(folder: Path, manifest: Manifest) -> None:
    """Make a tag complete; all of its files must be on the disk."""
    manifest.write(folder)
    with suppress(OSError):  # a marker beside a manifest is ignored
        (folder / MARKER).unlink()


def seal(folder: Path, force: bool = False) -> Manifest:
    """Write the manifest of all files in a folder of another writer, which makes it complete.

    A folder that is marked as incomplete, or holds links or pipes, raises ValueError; `force` seals
    even an incomplete one.  To be called by one process, after all have written.  Costs one read of
    all files, mostly from the page cache.  The manifest has world size 0 and rank 0 for all files,
    as the writers are unknown.
    """
    folder = Path(folder)
    if not force and tag_at(folder).state == INCOMPLETE:
        raise ValueError(
            f"{folder}: is incomplete: saving or deleting it was interrupted, so that files may be "
            "missing; to seal it anyway, use --force (force=True)"
        )
    sequence = next_sequence(folder.resolve().parent)
    files = [file_entry(folder, path, 0) for path in paths_in(folder)]
    for parent in {folder, *(Path(folder, file.path).parent for file in files)}:
        sync_folder(parent)
    manifest = Manifest.of(sequence, 0, files)
    end(folder, manifest)
    return manifest


def file_entry(folder: Path, path: str, rank: int) -> File:
    """Sync a file to the disk, and return its entry in a manifest."""
    with opened(folder, path) as file:
        os.fsync(file.fileno())
        return File(path, os.fstat(file.fileno()).st_size, hash_of(file), rank)


def verify(folder: Path) -> Manifest:
    """Compare a folder with its manifest, which is returned; costs one read of all files.

    Damages raise ValueError, which lists them; a folder that was not sealed FileNotFoundError.
    """
    manifest = Manifest.read(folder)
    if damages := manifest.check(folder):
        raise ValueError(f"{folder} is damaged:\n{lines(damages)}")
    return manifest


def lines(damages: list[Damage], most: int = 20) -> str:
    """Return a line for each damage, up to `most`."""
    shown = [f"  {damage}" for damage in damages[:most]]
    if len(damages) > most:
        shown.append(f"  and {len(damages) - most} more")
    return "\n".join(shown)


def read_latest(folder: Path, name: str = LATEST) -> str | None:
    """Return the tag that a folder's `latest` names, None without; ValueError if it is damaged."""
    path = Path(folder, name)
    try:
        text = read_at_most(folder, name, LIMIT_BYTES).decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: damaged, expected the name of a tag: {error}") from error
    if leads_out(text) or not text.isprintable():
        raise ValueError(f"{path}: damaged, got {text[:80]!r}, expected the name of a tag")
    return PurePosixPath(text).as_posix()  # strips "./" and a trailing slash


def folder_of(folder: Path, tag: str) -> Path | None:
    """Return the folder of a tag, None if it does not exist or is reached through a link."""
    if leads_out(tag):
        return None
    path = Path(folder)
    for part in PurePosixPath(tag).parts:
        path /= part
        if not is_folder(path):
            return None
    return path


def write_latest(folder: Path, tag: str, name: str = LATEST) -> None:
    """Have a folder's `latest` name a tag."""
    write_atomically(Path(folder, name), tag.encode())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of tags during the block: one process at a time changes them.

    If another process holds it, BlockingIOError says which.  On a file system without locks the
    block runs unlocked.
    """
    with flock.opened(folder / LOCK) as file:
        if not flock.take_where_possible(file):
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"another job saves into this folder, or prunes it: {flock.holder(file)} holds "
                f"{folder / LOCK}; give each job a folder of its own",
            )
        yield


def prune(folder: Path, keep: int) -> list[str]:
    """Delete all but `keep` complete tags, and incomplete ones older than the newest complete.

    Returns the names of the deleted ones.  The caller holds the lock of the folder.

    Never deletes the tag that `latest` names, tags saved without zero8, tags whose manifest is
    damaged, tags with missing files or files of another size, and links.  Contents of files are not
    verified.
    """
    if keep < 1:
        raise ValueError(f"keep: got {keep}, expected 1 or more")
    latest, complete = read_latest(folder), whole_tags(folder)
    if not complete:
        return []
    newest = complete[-1].sequence
    torn = [tag for tag in tags_in(folder) if tag.state == INCOMPLETE and tag.sequence < newest]
    kept = (latest or "").partition("/")[0]  # `latest` can name a folder in a folder
    doomed = [tag for tag in torn + complete[:-keep] if tag.name != kept]
    for tag in doomed:
        _delete(Path(folder, tag.name), tag.sequence)
    return [tag.name for tag in doomed]


def _make_incomplete(folder: Path, sequence: int, note: str) -> None:
    write_atomically(folder / MARKER, json.dumps({"sequence": sequence, "note": note}).encode())
    (folder / MANIFEST).unlink(missing_ok=True)
    sync_folder(folder)


def _delete(folder: Path, sequence: int) -> None:
    _make_incomplete(folder, sequence, "is being deleted")
    for path in folder.iterdir():
        if path.name != MARKER:
            if is_folder(path):
                shutil.rmtree(path)
            else:
                path.unlink()
    (folder / MARKER).unlink()
    folder.rmdir()


def _marker(folder: Path) -> dict[str, Any]:
    """Return the content of a tag's marker, {} if it cannot be read."""
    try:
        found = json.loads(read_at_most(Path(folder), MARKER, LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
