# SPDX-License-Identifier: Apache-2.0
"""Compares nests of containers, tensors and values, bit by bit."""

import torch


def assert_same(got, expected) -> None:
    found = difference(got, expected)
    assert not found, found  # on a rank pytest does not show it


def difference(a, b, path="") -> str:
    """Return where two nests of containers, tensors and values differ in any bit, "" if nowhere."""
    if type(a) is not type(b):
        return f"{path}: {type(a)} and {type(b)}"
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{path}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        ours, theirs = (t.detach().reshape(-1).view(torch.uint8) for t in (a, b))
        count = (ours != theirs).sum().item()
        return f"{path}: {count} of {ours.numel()} bytes differ" if count else ""
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return f"{path}: keys {sorted(a)} and {sorted(b)}"
        pairs = [(f"{path}.{key}", a[key], b[key]) for key in a]
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{path}: lengths {len(a)} and {len(b)}"
        pairs = [(f"{path}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return "" if a == b else f"{path}: {a!r} and {b!r}"
    found = [difference(x, y, where) for where, x, y in pairs]
    return "; ".join(filter(None, found))
