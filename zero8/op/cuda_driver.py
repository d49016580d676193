# SPDX-License-Identifier: Apache-2.0
"""Loads and launches kernels through the CUDA driver, which every machine with a GPU has."""

import ctypes
from collections.abc import Iterable, Sequence

LIBRARY = "libcuda.so.1"


class Driver:
    """The calls of the CUDA driver that a launch needs; torch has made the context."""

    def __init__(self) -> None:
        """Load the driver's library; raises OSError if it is missing."""
        self._library = ctypes.CDLL(LIBRARY)

    def functions(self, code: bytes, names: Iterable[str]) -> dict[str, ctypes.c_void_p]:
        """Load machine code into the current context, permanently; return its kernels by name."""
        module, found = ctypes.c_void_p(), {}
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(code))
        for name in names:
            found[name] = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(found[name]), module, name.encode())
        return found

    def resident_blocks(self, function: ctypes.c_void_p, threads: int) -> int:
        """Return how many thread blocks of a kernel a multiprocessor runs at a time."""
        count = ctypes.c_int()
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        self._call(name, ctypes.byref(count), function, threads, ctypes.c_size_t(0))
        return count.value

    def launch(
        self,
        function: ctypes.c_void_p,
        grid: int,
        block: tuple[int, int],
        arguments: Sequence[int],
        stream: int,
    ) -> None:
        """Launch a kernel whose arguments are 64-bit numbers and addresses."""
        values = [ctypes.c_uint64(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        shape = (grid, 1, 1, *block, 1)
        self._call("cuLaunchKernel", function, *shape, 0, ctypes.c_void_p(stream), pointers, None)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name} failed: {(text.value or b'unknown error').decode()}")
