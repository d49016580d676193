# SPDX-License-Identifier: Apache-2.0
"""How messages show values from outside: as a short text, whatever they are.

Nested lists that share their items can be a few bytes in a file, and more text than memory holds.
"""

from collections.abc import Iterable

MAX_CHARACTERS = 80
MAX_BITS = 128
MAX_ITEMS = 20


def shown(value: object) -> str:
    """Return a number or a short text as Python writes it; for other values, their type or size."""
    if isinstance(value, str | bytes):
        rest = f"... ({len(value)} characters)" if len(value) > MAX_CHARACTERS else ""
        return repr(value[:MAX_CHARACTERS]) + rest
    if type(value) is int and value.bit_length() > MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    if value is None or type(value) in (int, float, bool):
        return repr(value)
    return f"a value of type {type(value).__name__}"


def shown_keys(keys: Iterable[object]) -> str:
    """Return the keys of a dict as the text of a sorted list, cut after `MAX_ITEMS` keys."""
    texts = sorted(map(shown, keys))
    rest = f", ... ({len(texts)} in all)" if len(texts) > MAX_ITEMS else ""
    return f"[{', '.join(texts[:MAX_ITEMS])}{rest}]"
