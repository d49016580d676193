# SPDX-License-Identifier: Apache-2.0
"""What page-locked memory takes beyond its tensors.

torch rounds each page-locked tensor up to a power of two of bytes, unless it has more than
`pinned_max_round_threshold_mb` of PYTORCH_ALLOC_CONF (torch 2.13,
ATen/core/CachingHostAllocator.h).
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

REMEDY_MIB = 64
"""A threshold above which what is not rounded is all that matters."""


def rounding_bytes(sizes_bytes: Iterable[int], max_round_mib: int | None) -> int:
    """Return what the allocator adds to tensors of these sizes."""
    limit = None if max_round_mib is None else max_round_mib * 2**20
    return sum(
        count * ((1 << (size - 1).bit_length()) - size)
        for size, count in Counter(sizes_bytes).items()
        if size and (limit is None or size <= limit)
    )


def variable_of(max_round_mib: int) -> str:
    """Return the setting of a threshold as an environment has it."""
    return f"PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:{max_round_mib}"


def max_round_mib(environment: Mapping[str, str]) -> int | None:
    """Return the threshold that torch would read from an environment, None if there is none."""
    text = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    found = re.search(r"\bpinned_max_round_threshold_mb:(\d+)", text)
    return int(found[1]) if found else None
