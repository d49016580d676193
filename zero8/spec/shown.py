# SPDX-License-Identifier: Apache-2.0
"""How messages show values that came from outside: in a few words, whatever they are.

A list that holds itself twice, and that one twice, and so on, is a few bytes in a file, and more
than any memory as text.
"""

from collections.abc import Iterable

MAX_CHARACTERS = 80
MAX_BITS = 128
MAX_ITEMS = 20


def shown(value: object) -> str:
    """Return a number or a short text as Python writes it, of all else what it is."""
    if isinstance(value, str | bytes):
        rest = f"... ({len(value)} characters)" if len(value) > MAX_CHARACTERS else ""
        return repr(value[:MAX_CHARACTERS]) + rest
    if type(value) is int and value.bit_length() > MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    if value is None or type(value) in (int, float, bool):
        return repr(value)
    return f"a value of type {type(value).__name__}"


def shown_keys(keys: Iterable[object]) -> str:
    """Return the keys of a dict as a sorted list of them is written, of many the first ones."""
    texts = sorted(map(shown, keys))
    rest = f", ... ({len(texts)} in all)" if len(texts) > MAX_ITEMS else ""
    return f"[{', '.join(texts[:MAX_ITEMS])}{rest}]"
