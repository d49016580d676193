# SPDX-License-Identifier: Apache-2.0
"""The tags of a folder of checkpoints: which of them are complete, which is the newest.

A tag is a folder, and no link to one.  It is complete if it has a manifest, which is all that
counts: a marker beside it is left over.  With a marker and no manifest, a save or a deletion was
interrupted.  With neither, it was saved without zero8, and nobody can tell.

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
from pathlib import Path, PurePosixPath
from typing import Any

from zero8.checkpoint.files.atomic import sync_folder, write_atomically
from zero8.checkpoint.files.inside import is_folder, leads_out, read_at_most, remove
from zero8.checkpoint.files.manifest import LARGEST_SEQUENCE, MANIFEST, MARKER, Manifest, paths_in

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
"""Files beside tags that name the one to load, and the one to load as a universal checkpoint."""
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
    except FileNotFoundError:
        if not os.path.lexists(folder / MARKER):
            return Tag(folder.name, UNVERIFIED, 0)
    except (OSError, ValueError) as error:
        return Tag(folder.name, DAMAGED, 0, str(error))
    sequence = _marker(folder).get("sequence")
    if not (type(sequence) is int and 0 <= sequence <= LARGEST_SEQUENCE):
        sequence = 0  # only the order suffers
    return Tag(folder.name, INCOMPLETE, sequence)


def tags_in(folder: Path) -> list[Tag]:
    """Return the tags of a folder by their sequence number, those without one first."""
    found = [tag_at(path) for path in Path(folder).iterdir() if is_folder(path)]
    return sorted(found, key=lambda tag: (tag.sequence, tag.name))


def complete_tags(folder: Path) -> list[Tag]:
    """Return the complete tags of a folder, the newest last."""
    return [tag for tag in tags_in(folder) if tag.state == COMPLETE]


def whole_tags(folder: Path) -> list[Tag]:
    """Return the complete tags whose files are all there with their sizes, the newest last."""
    return [tag for tag in tags_in(folder) if _is_whole(folder, tag)]


def next_sequence(folder: Path) -> int:
    """Return the number for the next tag of a folder.

    Raises:
        ValueError: if a tag has the largest number that there is.
    """
    tags = tags_in(folder)
    if tags and tags[-1].sequence == LARGEST_SEQUENCE:
        raise ValueError(
            f"{Path(folder, tags[-1].name)}: got sequence {LARGEST_SEQUENCE}, after which there is "
            "none; delete this tag, or save into another folder"
        )
    return 1 + (tags[-1].sequence if tags else 0)


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

    Raises:
        ValueError: if the tag is a symbolic link, or holds one in place of a part: whoever saves
            would write where it leads.  Nothing has been changed then.
    """
    if folder.is_symlink():
        raise ValueError(
            f"{folder}: got a symbolic link, expected a folder for the tag; remove it, or name "
            "another tag"
        )
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent)
    present, earlier = list(paths_in(folder)), []
    if tag_at(folder).state != UNVERIFIED:
        earlier = [path for path in present if is_part(path)]
    with suppress(FileNotFoundError, ValueError):
        earlier += [file.path for file in Manifest.read(folder).files]
    # A link may stand for a part, or for a folder of parts.
    parts = [path for path in present if is_part(path) or is_part(f"{path}/")]
    _check_no_links(folder, [*parts, *earlier])
    _make_incomplete(folder, sequence, note)
    for path in earlier:
        remove(folder, path)
    for parent, _, _ in os.walk(folder, topdown=False):  # DeepSpeed wants to make some of them
        with suppress(OSError):  # it holds something else
            os.rmdir(parent)


def abandon(folder: Path) -> None:
    """Undo `begin` for a tag that will have no manifest: nobody can tell whether it is complete."""
    (folder / MARKER).unlink(missing_ok=True)


def note_of(folder: Path) -> str | None:
    """Return the note of the save that goes on, or was interrupted, in the folder of a tag."""
    return _marker(folder).get("note")


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
        text = read_at_most(folder, name, LIMIT_BYTES).decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: damaged, expected the name of a tag: {error}") from error
    if leads_out(text) or not text.isprintable():
        raise ValueError(f"{path}: damaged, got {text[:80]!r}, expected the name of a tag")
    return PurePosixPath(text).as_posix()  # without a slash at its end, and "./" before it


def folder_of(folder: Path, tag: str) -> Path | None:
    """Return the folder of a tag, None if there is none, or it is reached through a link."""
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


def prune(folder: Path, keep: int) -> list[str]:
    """Delete the oldest complete tags, and interrupted ones that a complete tag follows.

    The tag that `latest` names stays, and so do those saved without zero8, those whose manifest is
    damaged, those that lack a file of their manifest or have one of another size, and links.  The
    files that stay are not read: `zero8 checkpoint verify` does that.

    Args:
        folder: of the tags, whose lock the caller holds.
        keep: number of complete tags to keep, at least 1.

    Returns:
        The names of the deleted.

    Raises:
        ValueError: if `keep` is less than 1, or `latest` names no tag: it could be any.
        OSError: if something cannot be deleted.
    """
    if keep < 1:
        raise ValueError(f"keep: got {keep}, expected 1 or more")
    latest = read_latest(folder)
    found = tags_in(folder)
    complete = [tag for tag in found if _is_whole(folder, tag)]
    if not complete:
        return []
    newest = complete[-1].sequence
    torn = [tag for tag in found if tag.state == INCOMPLETE and tag.sequence < newest]
    kept = PurePosixPath(latest or "").parts[:1]  # `latest` can name a folder in a folder
    doomed = [tag for tag in torn + complete[:-keep] if tag.name not in kept]
    for tag in doomed:
        _delete(Path(folder, tag.name), tag.sequence)
    return [tag.name for tag in doomed]


def _is_whole(folder: Path, tag: Tag) -> bool:
    path = Path(folder, tag.name)
    return tag.state == COMPLETE and Manifest.read(path).is_there(path)


def _check_no_links(folder: Path, paths: list[str]) -> None:
    """Raise ValueError if one of these paths is a symbolic link, or leads through one."""
    folders = {str(up) for path in paths for up in PurePosixPath(path).parents}
    for path in sorted(folders.union(paths) - {"."}):
        if os.path.islink(folder / path):
            raise ValueError(
                f"{folder / path}: got a symbolic link in the folder of a tag that is to be saved, "
                "expected none; remove it"
            )


def _make_incomplete(folder: Path, sequence: int, note: str) -> None:
    write_atomically(folder / MARKER, json.dumps({"sequence": sequence, "note": note}).encode())
    (folder / MANIFEST).unlink(missing_ok=True)
    sync_folder(folder)


def _delete(folder: Path, sequence: int) -> None:
    for _ in paths_in(folder):  # raises for folders that cannot be deleted, while all is there
        pass
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
    """Return what the marker of a tag says, as far as it can be read."""
    try:
        found = json.loads(read_at_most(Path(folder), MARKER, LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
