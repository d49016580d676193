# SPDX-License-Identifier: Apache-2.0
"""The tags of a folder of checkpoints: which of them are complete, which is the newest.

A tag is a folder.  It is complete if it has a manifest, which is all that counts: a marker beside
it is left over.  With a marker and no manifest, a save or a deletion was interrupted.  With
neither, it was saved without zero8, and nobody can tell.

    save      marker, manifest (of an earlier save) away, files, manifest, marker away
    delete    marker, manifest away, files away, marker away

The order of tags is that of their sequence numbers: clocks and times of files do not matter.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zero8.integrity.files import sync_folder, write_atomically
from zero8.integrity.manifest import MANIFEST, MARKER, Manifest, paths_in

LATEST = "latest"
LIMIT_BYTES = 4096

COMPLETE, INCOMPLETE, UNVERIFIED, DAMAGED = "complete", "incomplete", "unverified", "damaged"


@dataclass(frozen=True)
class Tag:
    """A folder in a folder of checkpoints.

    Attributes:
        name: of the folder.
        state: COMPLETE; INCOMPLETE: saving or deleting it was interrupted; UNVERIFIED: saved
            without zero8; DAMAGED: its manifest cannot be read.
        sequence: its number; 0 if it is not known.
        problem: what is wrong with the manifest of a damaged one.
    """

    name: str
    state: str
    sequence: int
    problem: str = ""


def tag_at(folder: Path) -> Tag:
    """Return what the folder of a tag is; it must exist."""
    folder = Path(folder)
    try:
        return Tag(folder.name, COMPLETE, Manifest.read(folder).sequence)
    except ValueError as error:
        return Tag(folder.name, DAMAGED, 0, str(error))
    except FileNotFoundError:
        if not (folder / MARKER).exists():
            return Tag(folder.name, UNVERIFIED, 0)
    try:
        sequence = json.loads(_short(folder / MARKER))["sequence"]
    except (OSError, ValueError, TypeError, KeyError):  # only the order suffers
        sequence = 0
    return Tag(folder.name, INCOMPLETE, sequence if type(sequence) is int else 0)


def tags_in(folder: Path) -> list[Tag]:
    """Return the tags of a folder by their sequence number, those without one first."""
    found = [tag_at(path) for path in Path(folder).iterdir() if path.is_dir()]
    return sorted(found, key=lambda tag: (tag.sequence, tag.name))


def complete_tags(folder: Path) -> list[Tag]:
    """Return the complete tags of a folder, the newest last."""
    return [tag for tag in tags_in(folder) if tag.state == COMPLETE]


def next_sequence(folder: Path) -> int:
    """Return the number for the next tag of a folder."""
    return 1 + max((tag.sequence for tag in tags_in(folder)), default=0)


def begin(
    folder: Path, sequence: int, note: str = "", is_part: Callable[[str], bool] = lambda path: True
) -> None:
    """Make a tag incomplete, new or not; files of an earlier save of it are deleted.

    Those of a tag that was saved without zero8 stay.

    Args:
        folder: of the tag; its parent must exist.
        sequence: its number, see `next_sequence`.
        note: kept in the marker.
        is_part: whether a file that no manifest has belongs to an earlier save, by its path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent)
    earlier = []
    if tag_at(folder).state != UNVERIFIED:
        earlier = [path for path in paths_in(folder) if is_part(path)]
    with suppress(FileNotFoundError, ValueError):
        earlier += [file.path for file in Manifest.read(folder).files]
    _make_incomplete(folder, sequence, note)
    for path in earlier:
        (folder / path).unlink(missing_ok=True)
    for parent, _, _ in os.walk(folder, topdown=False):
        if parent != str(folder):
            with suppress(OSError):  # it holds something else
                os.rmdir(parent)


def note_of(folder: Path) -> str | None:
    """Return the note of the save that goes on, or was interrupted, in the folder of a tag."""
    try:
        return json.loads(_short(Path(folder, MARKER)))["note"]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def end(folder: Path, manifest: Manifest) -> None:
    """Make a tag complete; all of its files must be on the disk."""
    manifest.write(folder)
    with suppress(OSError):  # beside a manifest it means nothing
        (folder / MARKER).unlink()


def read_latest(folder: Path, name: str = LATEST) -> str | None:
    """Return the tag that a folder's `latest` names, None without such a file.

    Raises:
        ValueError: if it names none.
    """
    path = Path(folder, name)
    try:
        text = _short(path).strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ValueError(f"{path}: damaged, expected the name of a tag: {error}") from error
    if not text or not text.isprintable() or ".." in Path(text).parts or text.startswith("/"):
        raise ValueError(f"{path}: damaged, got {text[:80]!r}, expected the name of a tag")
    return text


def write_latest(folder: Path, tag: str, name: str = LATEST) -> None:
    """Have a folder's `latest` name a tag."""
    write_atomically(Path(folder, name), tag.encode())


def prune(folder: Path, keep: int) -> list[str]:
    """Delete the oldest complete tags and interrupted ones that a complete tag follows.

    The tag that `latest` names stays, and so do those saved without zero8, those with a damaged
    manifest, and links.

    Args:
        folder: of the tags.
        keep: number of complete tags to keep, at least 1.

    Returns:
        The names of the deleted.
    """
    if keep < 1:
        raise ValueError(f"keep: got {keep}, expected 1 or more")
    complete = complete_tags(folder)
    if not complete:
        return []
    try:
        latest = read_latest(folder)
    except ValueError:
        latest = None
    newest = complete[-1].sequence
    torn = [t for t in tags_in(folder) if t.state == INCOMPLETE and t.sequence < newest]
    doomed = [tag for tag in torn + complete[:-keep] if tag.name != latest]
    doomed = [tag for tag in doomed if not Path(folder, tag.name).is_symlink()]
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
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    (folder / MARKER).unlink()
    folder.rmdir()


def _short(path: Path) -> str:
    """Return the text of a file that has a line at most; raises ValueError if it is longer."""
    with open(path, "rb") as file:
        data = file.read(LIMIT_BYTES + 1)
    if len(data) > LIMIT_BYTES:
        raise ValueError(f"got more than {LIMIT_BYTES} bytes")
    return data.decode()
