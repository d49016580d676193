# SPDX-License-Identifier: Apache-2.0
"""What AVX2 takes here: time in the cache, and the clock, and so cycles per parameter."""

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from zero8.bench.step.kernel import time_in_cache
from zero8.op import build

# A product waits for the one before it: three cycles on every x86-64 processor since 2008 (Intel)
# and 2017 (AMD).  The loop's own instructions run beside it.
PRODUCT_CYCLES = 3
# A processor that is shared is slower for seconds on end while another guest uses the same core.
ROUNDS = 8
_PRODUCTS = 100
_TURNS = 200_000
CLOCK_METHOD = (
    f"a chain of {_PRODUCTS * _TURNS:,} dependent 64-bit products of {PRODUCT_CYCLES} cycles each, "
    "timed by the thread's CPU clock before each measurement, the fastest of all"
)
_SOURCE = f"""
#include <cstdint>
#include <ctime>
extern "C" double ns_of_chain() {{
  timespec began, ended;
  uint64_t x = 3;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &began);
  for (int i = 0; i < {_TURNS}; ++i) {{
    asm volatile(".rept {_PRODUCTS}\\n imulq %0, %0\\n .endr" : "+r"(x));
  }}
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ended);
  return 1e9 * (ended.tv_sec - began.tv_sec) + (ended.tv_nsec - began.tv_nsec);
}}
"""


def clock(folder: Path) -> Callable[[], float]:
    """Return a function that measures the clock of this core, in cycles per ns.

    Raises:
        RuntimeError: if there is no C++ compiler.
    """
    compiler = build.compiler()
    if compiler is None:
        raise RuntimeError("the clock needs a C++ compiler: apt-get install g++, or set CXX")
    source, library = folder / "clock.cpp", folder / "clock.so"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
    ns_of_chain = ctypes.CDLL(str(library)).ns_of_chain
    ns_of_chain.restype = ctypes.c_double
    return lambda: PRODUCT_CYCLES * _PRODUCTS * _TURNS / ns_of_chain()


def measured(
    algorithm: str, codecs: Sequence[str], variants: Sequence[str], folder: Path
) -> list[dict]:
    """Return a row per codec and variant of one thread with AVX2: ns and cycles per parameter.

    Both time and clock are the best of ROUNDS rounds over all codecs.
    """
    cycles_per_ns = clock(folder)
    fastest: dict[tuple[str, str], dict] = {}
    clocks = []
    for codec in ROUNDS * tuple(codecs):
        clocks.append(cycles_per_ns())
        for row in time_in_cache([algorithm], [codec], ["avx2"]):
            case = codec, row["variant"]
            if case not in fastest or row["ns_per_param"] < fastest[case]["ns_per_param"]:
                fastest[case] = row
    ghz = max(clocks, default=0.0)
    return [
        {**row, "ghz": ghz, "cycles_per_param": row["ns_per_param"] * ghz}
        for (_, variant), row in fastest.items()
        if variant in variants
    ]
