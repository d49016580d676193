# SPDX-License-Identifier: Apache-2.0
"""Patches an attribute of a single object temporarily."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(thing: object, name: str, value: object) -> Iterator[None]:
    """Override an attribute of an object, not of its class, during the block."""
    assert name not in vars(thing), name
    setattr(thing, name, value)
    try:
        yield
    finally:
        delattr(thing, name)
