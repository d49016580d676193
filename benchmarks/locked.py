# SPDX-License-Identifier: Apache-2.0
"""Run a command on a host with less memory: the rest is locked, so that no page cache has it.

python -m benchmarks.locked 4.5 COMMAND ... leaves 4.5 GiB.  Needs a high `ulimit -l`, as root has.
"""

import ctypes
import mmap
import subprocess
import sys

import psutil


def main() -> int:
    """Lock all memory but so many GiB, run the command, and return its exit status."""
    available_gib, *command = sys.argv[1:]
    num_bytes = int(psutil.virtual_memory().available - float(available_gib) * 2**30)
    memory = mmap.mmap(-1, max(1, num_bytes))
    address = ctypes.byref(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(address, ctypes.c_size_t(len(memory))):
        raise OSError(ctypes.get_errno(), f"cannot lock {num_bytes} bytes")
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
