# SPDX-License-Identifier: Apache-2.0
"""Gradients under NVMe: of one that is cut for the disk no part keeps the whole alive."""

import torch

from zero8.deepspeed.swapper import SwapsStates

ALIGNMENT = 128  # elements


class Swapper(SwapsStates):
    """What cutting looks at, without a disk."""

    numel_alignment, min_aio_bytes, swap_element_size = ALIGNMENT, 4096, 4

    def __init__(self):
        pass


def test_gradients_cut_for_the_disk_keep_no_memory_but_their_own():
    """DeepSpeed holds what is too small for a file until the step; on a GPU gradients are freed."""
    grads = [torch.randn(numel) for numel in (1000, 2**14, 2**14 + 5, 300)]
    offsets = [0, 1000, 1000 + 2**14, 1005 + 2**15]
    parts, starts = Swapper()._adjust_for_misaligned_lengths(grads, offsets)
    flat = torch.full((1305 + 2**15,), torch.nan)
    kept_bytes = 0
    for part, start in zip(parts, starts, strict=True):
        flat[start : start + part.numel()] = part
        if 4 * part.numel() < Swapper.min_aio_bytes:
            kept_bytes += part.untyped_storage().nbytes()
        else:
            assert start % ALIGNMENT == 0 and part.numel() % ALIGNMENT == 0
    assert torch.equal(flat, torch.cat(grads))
    # The two small gradients, and at each end of the others less than an alignment.
    assert kept_bytes <= 4 * (1000 + 300 + 4 * ALIGNMENT)
