# SPDX-License-Identifier: Apache-2.0
"""XXH3 hashes of files and of bytes in memory.

They detect accidents, not manipulation: XXH3 is not cryptographic.
"""

import os
from collections.abc import Callable, Iterable
from io import FileIO
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES = 4 << 20

Progress = Callable[[int], object]
"""Called with the number of bytes read since the last call."""


def hash_of(file: FileIO, progress: Progress | None = None) -> str:
    """Return the XXH3 hash of the rest of an open file, 128 bits in hexadecimal digits.

    It takes up to `CHUNK_BYTES` of memory.
    """
    state = xxhash.xxh3_128()
    size_bytes = os.fstat(file.fileno()).st_size
    chunk = memoryview(bytearray(min(size_bytes + 1, CHUNK_BYTES)))
    while count := file.readinto(chunk):
        state.update(chunk[:count])
        if progress:
            progress(count)
    return state.hexdigest()


def hash_64(parts: "Iterable[Buffer]") -> int:
    """Return the XXH3 hash of bytes in memory, 64 bits as a number.

    Args:
        parts: contiguous objects with the buffer protocol, in order.
    """
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()
