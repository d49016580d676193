# SPDX-License-Identifier: Apache-2.0
"""The error for invalid options, as opposed to errors of the measurement itself."""

from collections.abc import Collection


class UsageError(ValueError):
    """An option has an invalid value; the message names valid ones."""


def check_names(option: str, names: Collection[str], valid: Collection[str]) -> None:
    """Raise UsageError for a name that is not valid."""
    if unknown := [name for name in names if name not in valid]:
        raise UsageError(f"{option}: got {unknown[0]!r}, expected one of {list(valid)}")


def check_least(option: str, value: int, least: int) -> None:
    """Raise UsageError for a number that is too small."""
    if value < least:
        raise UsageError(f"{option}: got {value}, expected at least {least}")


def check_multiple(option: str, value: int, unit: int, least: int) -> None:
    """Raise UsageError for a number that is not a multiple of a unit, or too small."""
    if value < least or value % unit:
        raise UsageError(f"{option}: got {value}, expected a multiple of {unit}, at least {least}")


def chosen(words: str | None, default: Collection[str]) -> tuple[str, ...]:
    """Return the comma-separated names in an option's value, or the default."""
    return tuple(default) if words is None else tuple(filter(None, words.split(",")))
