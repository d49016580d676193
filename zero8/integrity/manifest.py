# SPDX-License-Identifier: Apache-2.0
"""The manifest of a folder: size, hash and writer of every file; it is written last.

    {"format": 1, "sequence": 7, "world_size": 2,
     "files": [{"path": "a/b.pt", "size_bytes": 5, "hash": "32 hexadecimal digits", "rank": 1}],
     "hash": "of all that stands before, as written"}

A folder with a manifest is complete.  A manifest comes from a disk that may be damaged and from
people: it is read as data that may say anything, and nothing outside its folder is ever looked at.
"""

import heapq
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

import xxhash

from zero8.integrity.files import TEMPORARY, Progress, hash_of, write_atomically

MANIFEST = "zero8_manifest.json"
MARKER = "zero8_incomplete"
"""Stands in a folder from the beginning of a save to its end; see `zero8.integrity.tags`."""

FORMAT_VERSION = 1
LIMIT_BYTES = 64 << 20
_HASH = re.compile(r"[0-9a-f]{32}")
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class File:
    """A file of a folder.

    Attributes:
        path: relative to the folder, with slashes.
        size_bytes: its size.
        hash: as `zero8.integrity.files.hash_of` returns it.
        rank: which rank wrote it.
    """

    path: str
    size_bytes: int
    hash: str
    rank: int


@dataclass(frozen=True)
class Damage:
    """What is wrong with a file.

    Attributes:
        path: relative to the folder.
        rank: which rank wrote it; None if nobody has, as far as is known.
        reason: what is wrong.
    """

    path: str
    rank: int | None
    reason: str

    def __str__(self) -> str:
        """Return a line for people."""
        writer = "" if self.rank is None else f" (written by rank {self.rank})"
        return f"{self.path}{writer}: {self.reason}"


@dataclass(frozen=True)
class Manifest:
    """What a complete folder holds.

    Attributes:
        sequence: larger than those of the tags beside it that were begun before.
        world_size: number of ranks that wrote it.
        files: in the order of their paths.
    """

    sequence: int
    world_size: int
    files: tuple[File, ...]

    @classmethod
    def of(cls, sequence: int, world_size: int, files: Iterable[File]) -> "Manifest":
        """Return the manifest of these files.

        Raises:
            ValueError: if what they say cannot be written down: two that are the same one, say.
        """
        manifest = cls(sequence, world_size, tuple(sorted(files, key=lambda file: file.path)))
        return cls.parsed(manifest.text().encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Return the manifest of a folder.

        Raises:
            FileNotFoundError: if there is none: the folder is not complete.
            ValueError: if it is damaged, or of a newer format.
        """
        path = Path(folder, MANIFEST)
        with open(path, "rb") as file:
            data = file.read(LIMIT_BYTES + 1)
        try:
            return cls.parsed(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def parsed(cls, data: bytes) -> "Manifest":
        """Return the manifest in these bytes; raises ValueError if there is none."""
        if len(data) > LIMIT_BYTES:
            raise ValueError(f"got more than {LIMIT_BYTES} bytes, no manifest is so long")
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"damaged, not JSON: {error}") from error
        version = found.get("format") if isinstance(found, dict) else None
        if type(version) is int and version > FORMAT_VERSION:
            raise ValueError(
                f"got format {version}, this zero8 reads {FORMAT_VERSION}; use a newer zero8"
            )
        names = ["format", "sequence", "world_size", "files", "hash"]
        if not isinstance(found, dict) or list(found) != names or version != FORMAT_VERSION:
            raise ValueError(f"damaged, expected a format, 1, and the entries {names[1:]}")
        files = found["files"]
        if not isinstance(files, list):
            raise ValueError("damaged, expected a list of files")
        manifest = cls(
            _integer("sequence", found["sequence"], 1),
            _integer("world_size", found["world_size"], 1),
            tuple(_file(entry) for entry in files),
        )
        if manifest.text().encode() != data:  # the hash, the order, and every space
            raise ValueError("damaged, its text is not what its own hash says")
        if len({file.path for file in manifest.files}) < len(manifest.files):
            raise ValueError("damaged, names a file twice")
        if any(file.rank >= manifest.world_size for file in manifest.files):
            raise ValueError(f"damaged, only {manifest.world_size} rank(s) can have written files")
        return manifest

    def text(self) -> str:
        """Return the JSON text."""
        files = ",\n".join(f"  {json.dumps(asdict(file))}" for file in self.files)
        before = (
            f'{{\n "format": {FORMAT_VERSION},\n "sequence": {self.sequence},\n'
            f' "world_size": {self.world_size},\n "files": [\n{files}\n ],\n'
        )
        return f'{before} "hash": "{xxhash.xxh3_128_hexdigest(before.encode())}"\n}}\n'

    def write(self, folder: Path) -> None:
        """Write the manifest, by which the folder becomes complete: all files must be synced."""
        write_atomically(Path(folder, MANIFEST), self.text().encode())

    def check(
        self,
        folder: Path,
        share: tuple[int, int] = (0, 1),
        progress: Progress | None = None,
        is_part: Callable[[str], bool] = lambda path: True,
    ) -> list[Damage]:
        """Return what is wrong with the folder; costs one read of the share's files.

        Args:
            folder: that the manifest is of.
            share: (i, n): check the files of share i of n only; all shares together are all files.
            progress: called with the numbers of bytes read.
            is_part: whether a file that the manifest does not have is damage, by its path.
        """
        index, count = share
        found = [
            Damage(file.path, file.rank, reason)
            for file in self.shares(count)[index]
            if (reason := self._wrong_with(file, Path(folder, file.path), progress))
        ]
        if index == 0:
            known = {file.path for file in self.files}
            found += [
                Damage(path, None, "not in the manifest, belongs to something else")
                for path in paths_in(folder)
                if path not in known and is_part(path)
            ]
        return found

    def shares(self, count: int) -> list[list[File]]:
        """Return the files in `count` shares of about equal bytes.

        As many ranks as wrote them get their own: those are what they read next.
        """
        shares: list[list[File]] = [[] for _ in range(count)]
        if count == self.world_size:
            for file in self.files:
                shares[file.rank].append(file)
            return shares
        lightest = [(0, index) for index in range(count)]
        for file in sorted(self.files, key=lambda file: (-file.size_bytes, file.path)):
            num_bytes, index = lightest[0]
            shares[index].append(file)
            heapq.heapreplace(lightest, (num_bytes + file.size_bytes, index))
        return shares

    def _wrong_with(self, file: File, path: Path, progress: Progress | None) -> str:
        """Return what is wrong with a file, "" if nothing is."""
        try:
            got = path.stat().st_size
            if got != file.size_bytes:
                kind = "truncated" if got < file.size_bytes else "too long"
                return f"{kind}: got {got} bytes, expected {file.size_bytes}"
            contents = hash_of(path, progress)
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if contents == file.hash:
            return ""
        for other in self.files:
            if other.hash == contents:
                return f"contents differ: they are those of {other.path} of rank {other.rank}"
        return "contents differ"


def paths_in(folder: Path) -> Iterator[str]:
    """Yield the paths of all files in a folder, relative and with slashes, without our own."""
    folder = Path(folder)
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            ours = parent == str(folder) and name in (MANIFEST, MARKER)
            # NFS calls a file so that was deleted while someone has it open.
            if not (ours or name.endswith(TEMPORARY) or name.startswith(".nfs")):
                yield Path(parent, name).relative_to(folder).as_posix()


def _file(entry: object) -> File:
    if not isinstance(entry, dict) or list(entry) != ["path", "size_bytes", "hash", "rank"]:
        raise ValueError(f"damaged, got {str(entry)[:80]} as a file")
    digits = entry["hash"]
    if not isinstance(digits, str) or not _HASH.fullmatch(digits):
        raise ValueError(f"damaged, got hash {str(digits)[:80]!r}")
    size_bytes = _integer("size_bytes", entry["size_bytes"], 0)
    return File(_inside(entry["path"]), size_bytes, digits, _integer("rank", entry["rank"], 0))


def _inside(path: object) -> str:
    """Return a path that does not lead out of its folder."""
    if not isinstance(path, str) or not 0 < len(path) <= 4096 or not path.isprintable():
        raise ValueError(f"damaged, got path {str(path)[:80]!r}")
    if path.startswith("/") or PurePosixPath(path).as_posix() != path or path == ".":
        raise ValueError(f"got path {path[:80]!r}, expected one inside the folder")
    if ".." in PurePosixPath(path).parts or path in (MANIFEST, MARKER):
        raise ValueError(f"got path {path[:80]!r}, expected one of a file inside the folder")
    return path


def _integer(name: str, value: object, smallest: int) -> int:
    if type(value) is not int or not smallest <= value <= _LARGEST:
        raise ValueError(f"damaged, got {name} {str(value)[:80]}, expected {smallest} or more")
    return value
