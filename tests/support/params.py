# SPDX-License-Identifier: Apache-2.0
"""Parameters of the tests that pytest is going to run."""

from collections.abc import Collection, Iterable

import pytest


def layouts_to_run(request: pytest.FixtureRequest, layouts: Iterable[str]) -> list[str]:
    """Return the layouts that tests of the requesting file, of those to run, have as `name`.

    All tests of a file run in one process, in `make test` too.
    """
    items = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    return [name for name in layouts if name in asked]


def each(rows: Iterable[str], slow: Collection[str] = ()) -> pytest.MarkDecorator:
    """Run a test with each of some `name`s, those of `slow` as slow tests."""
    params = [pytest.param(one, marks=[pytest.mark.slow] * (one in slow)) for one in rows]
    return pytest.mark.parametrize("name", params)
