# SPDX-License-Identifier: Apache-2.0
"""An object for a method of DeepSpeed's to work on in the place of its own."""

from typing import Any


class StandIn:
    """Some attributes of its own; all others are those of the original."""

    def __init__(self, original: Any, **own: Any):
        """Take the original, and the attributes that differ."""
        self.original = original
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original."""
        return getattr(self.original, name)
