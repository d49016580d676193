# SPDX-License-Identifier: Apache-2.0
"""Changes one object of DeepSpeed's, and no other of its class, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(thing: object, name: str, value: object) -> Iterator[None]:
    """Give one object, not its class, another attribute during the block."""
    assert name not in vars(thing), name
    setattr(thing, name, value)
    try:
        yield
    finally:
        delattr(thing, name)
