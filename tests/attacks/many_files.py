# SPDX-License-Identifier: Apache-2.0
"""Sealed folders with 20,000 more files, all empty or all other than their manifest says.

Work for each file that grows with the number of files takes hours on a folder that takes seconds to
make.
"""

from pathlib import Path

import xxhash
from attack import Attack, checkpoint, main, sealed

from zero8.files.manifest import MANIFEST, File, Manifest

COUNT = 20_000


def listing(contents: bytes, listed: bytes):
    """Return what makes files with contents, and a manifest with the hash of others."""

    def plant(folder: Path) -> list[str]:
        tag = sealed(folder / "tags" / "t1")
        files, digits = [*Manifest.read(tag).files], xxhash.xxh3_128_hexdigest(listed)
        for number in range(COUNT):
            (tag / f"file{number}").write_bytes(contents)
            files.append(File(f"file{number}", len(contents), digits, 0))
        manifest = Manifest(1, 0, tuple(sorted(files, key=lambda file: file.path)))
        (tag / MANIFEST).write_text(manifest.text())  # `of` and `write` take seconds
        return checkpoint("verify", tag)

    return plant


ATTACKS = (
    Attack("empty files", listing(b"", b""), (0,), ("whole",), seconds=20),
    Attack("files with other contents", listing(b"a", b"b"), (1,), ("file0",), seconds=20),
)

if __name__ == "__main__":
    main(ATTACKS)
