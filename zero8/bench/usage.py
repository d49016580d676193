# SPDX-License-Identifier: Apache-2.0
"""The error for options that cannot be measured, apart from errors of the measurement itself."""


class UsageError(ValueError):
    """An option has a value that is not served; the text says which are."""
