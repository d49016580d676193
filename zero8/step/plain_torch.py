# SPDX-License-Identifier: Apache-2.0
"""The modes of torch in which an optimizer computes, whatever its caller has set."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_torch() -> Iterator[None]:
    """Compute in the dtypes of the tensors and without gradients.

    `torch.autocast` would multiply float32 matrices in 16 bits.
    """
    # Of all devices: matrices in host memory are orthogonalized on a GPU.
    with torch.no_grad(), torch._C._DisableAutocast():
        yield
