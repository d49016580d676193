# SPDX-License-Identifier: Apache-2.0
"""The manifest of a folder: size, hash and writer of every file; it is written last.

    {"format": 1, "sequence": 7, "world_size": 2,
     "files": [{"path": "a/b.pt", "size_bytes": 5, "hash": "32 hexadecimal digits", "rank": 1}],
     "hash": "hash of all the text before"}

A folder with a manifest is complete.  Manifests are untrusted: they may be damaged or crafted.  No
file outside the folder is read, and no link in it is followed.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from zero8.files.atomic import TEMPORARY, write_atomically
from zero8.files.inside import leads_out, opened, paths_of, read_at_most

if TYPE_CHECKING:
    from typing_extensions import Buffer

MANIFEST = "zero8_manifest.json"
MARKER = "zero8_incomplete"
"""A file that marks an unfinished save or deletion; see `zero8.files.tags`."""

FORMAT_VERSION = 1
LIMIT_BYTES = 64 << 20
_HASH = re.compile(r"[0-9a-f]{32}")


class File(NamedTuple):
    """A file of a folder; its path is relative, with slashes.

    The hash is XXH3 of its contents, which detects accidents, not manipulation.
    """

    path: str
    size_bytes: int
    hash: str
    rank: int  # which wrote it


class Damage(NamedTuple):
    """What is wrong with a file, and which rank wrote it, if known."""

    path: str
    rank: int | None
    reason: str

    def __str__(self) -> str:
        """Return a line for people."""
        writer = "" if self.rank is None else f" (written by rank {self.rank})"
        return f"{self.path}{writer}: {self.reason}"


@dataclass(frozen=True)
class Manifest:
    """The contents of a complete folder.

    Attributes:
        sequence: larger than that of every tag saved before into the same parent folder.
        world_size: number of ranks that wrote it; 0 if unknown, and all files are of rank 0 then.
        files: in the order of their paths.
    """

    sequence: int
    world_size: int
    files: tuple[File, ...]

    @classmethod
    def of(cls, sequence: int, world_size: int, files: Iterable[File]) -> "Manifest":
        """Return the manifest of these files; raise ValueError if two have the same path."""
        manifest = cls(sequence, world_size, tuple(sorted(files, key=lambda file: file.path)))
        return cls.parsed(manifest.text().encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Return the manifest of a folder; raise ValueError if it cannot be read.

        Without one, the folder is not complete: FileNotFoundError.
        """
        path = Path(folder, MANIFEST)
        try:
            return cls.parsed(read_at_most(folder, MANIFEST, LIMIT_BYTES))
        except FileNotFoundError:
            raise
        except (ValueError, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ValueError(reason if str(path) in reason else f"{path}: {reason}") from error

    @classmethod
    def parsed(cls, data: bytes) -> "Manifest":
        """Return the manifest in these bytes; raises ValueError if they are damaged."""
        try:
            found = json.loads(data)
            version = found["format"]
            if type(version) is int and version > FORMAT_VERSION:
                what = f"got format {version}, this zero8 reads {FORMAT_VERSION}"
                raise ValueError(f"{what}; use a newer zero8")
            files = tuple(File(**entry) for entry in found["files"])
            manifest = cls(found["sequence"], found["world_size"], files)
            if manifest.text().encode() != data:  # compares the hash, the order and all spaces
                raise ValueError("damaged, its text does not match its hash")
            manifest._check_values()
        except (LookupError, TypeError, RecursionError, json.JSONDecodeError) as error:
            raise ValueError(f"damaged, not a manifest in JSON: {str(error)[:200]}") from error
        return manifest

    def _check_values(self) -> None:
        """Raise ValueError for values that no save writes, whatever the hash says."""
        ranks = range(max(1, self.world_size))
        if type(self.sequence) is not int or self.sequence < 1 or self.world_size < 0:
            raise ValueError(f"damaged, got sequence {self.sequence}, world size {self.world_size}")
        for file in self.files:
            _check_path(file.path)
            if file.size_bytes < 0 or file.rank not in ranks or not _HASH.fullmatch(file.hash):
                raise ValueError(f"damaged, got {str(file)[:200]}")
        if len({file.path for file in self.files}) < len(self.files):
            raise ValueError("damaged, names a file twice")

    def text(self) -> str:
        """Return the JSON text."""
        files = ",\n".join(f"  {json.dumps(file._asdict())}" for file in self.files)
        before = (
            f'{{\n "format": {FORMAT_VERSION},\n "sequence": {self.sequence},\n'
            f' "world_size": {self.world_size},\n "files": [\n{files}\n ],\n'
        )
        return f'{before} "hash": "{xxhash.xxh3_128_hexdigest(before.encode())}"\n}}\n'

    def write(self, folder: Path) -> None:
        """Write the manifest, which makes the folder complete: all files must be synced before."""
        write_atomically(Path(folder, MANIFEST), self.text().encode())

    def check(
        self,
        folder: Path,
        share: tuple[int, int] = (0, 1),
        is_part: Callable[[str], bool] = lambda path: True,
        is_read: Callable[[str], bool] = lambda path: True,
    ) -> list[Damage]:
        """Return the damages of the folder; costs one read of the share's files, (index, count).

        An unlisted file is a damage if `is_part`, a missing one if `is_read`, given their paths.
        """
        index, count = share
        files = [file for file in self.share(index, count) if is_read(file.path)]
        found = [damage for file in files if (damage := self.damage_of(folder, file))]
        return found + (self.unlisted(folder, is_part) if index == 0 else [])

    def unlisted(
        self, folder: Path, is_part: Callable[[str], bool] = lambda path: True
    ) -> list[Damage]:
        """Return the files in the folder that the manifest does not list, if `is_part`."""
        known = {file.path for file in self.files}
        return [
            Damage(path, None, "not in the manifest")
            for path in paths_in(folder)
            if path not in known and is_part(path)
        ]

    def damage_of(self, folder: Path, file: File, reads: bool = True) -> Damage | None:
        """Return the damage of a file of the folder, None if there is none.

        Unless it `reads` the file, only the size is compared.
        """
        reason = ""
        try:
            with opened(folder, file.path) as contents:
                size_bytes = os.fstat(contents.fileno()).st_size
                if size_bytes != file.size_bytes:
                    kind = "truncated" if size_bytes < file.size_bytes else "too long"
                    reason = f"{kind}: got {size_bytes} bytes, expected {file.size_bytes}"
                elif reads and (digits := hash_of(contents)) != file.hash:
                    other = self._by_hash.get(digits)
                    whose = (
                        f": they are those of {other.path} of rank {other.rank}" if other else ""
                    )
                    reason = f"contents differ{whose}"
        except FileNotFoundError:
            reason = "missing"
        except (OSError, ValueError) as error:
            reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        return Damage(file.path, file.rank, reason) if reason else None

    def is_there(self, folder: Path) -> bool:
        """Return whether there are files and all have their sizes; does not read them."""
        found = (self.damage_of(folder, file, reads=False) for file in self.files)
        return bool(self.files) and not any(found)

    @cached_property
    def _by_hash(self) -> dict[str, File]:
        return {file.hash: file for file in reversed(self.files)}

    def share(self, index: int, count: int) -> list[File]:
        """Return one of `count` shares of the files, of about equal bytes.

        If `count` is the world size that wrote them, it has the files of one rank, which that rank
        reads next.
        """
        if count == self.world_size:
            return [file for file in self.files if file.rank == index]
        return sorted(self.files, key=lambda file: (-file.size_bytes, file.path))[index::count]


def hash_of(file: FileIO) -> str:
    """Return the XXH3 hash of the rest of an open file, 128 bits in hexadecimal digits."""
    return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def hash_64(parts: "Iterable[Buffer]") -> int:
    """Return the XXH3 hash of contiguous bytes in memory, in order, 64 bits as a number."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def paths_in(folder: Path) -> Iterator[str]:
    """Yield the paths of all files in a folder, relative and with slashes, except our own.

    Links, pipes and devices are included, so that opening them raises with their names.
    """
    for path in paths_of(folder):
        name = path.rpartition("/")[2]
        # NFS keeps a deleted file that is still open under a name with .nfs.
        is_temporary = name.endswith(TEMPORARY) or name.startswith(".nfs")
        if path not in (MANIFEST, MARKER) and not is_temporary:
            yield path


def _check_path(path: object) -> None:
    """Raise ValueError for a path that may lead out of its folder."""
    if not isinstance(path, str) or not 0 < len(path) <= 4096 or not path.isprintable():
        raise ValueError(f"damaged, got path {str(path)[:80]!r}")
    is_path = not leads_out(path) and PurePosixPath(path).as_posix() == path
    if not is_path or path in (MANIFEST, MARKER):
        raise ValueError(f"got path {path[:80]!r}, expected one inside the folder")
