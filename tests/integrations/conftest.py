# SPDX-License-Identifier: Apache-2.0
"""Leaves these tests out where the packages of zero8[integrations] are not installed."""

from importlib.util import find_spec

import pytest
from ranks import ranks_of_sizes

PACKAGES = "transformers accelerate peft trl bitsandbytes lightning torchtitan torchao".split()
PACKAGES += "axolotl llamafactory swift verl megatron".split()
MISSING = [name for name in PACKAGES if find_spec(name) is None]

collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str:
    """Say so; `make test-integrations` fails where nothing is left."""
    return f"tests/integrations: left out without {', '.join(MISSING)}" if MISSING else ""


@pytest.fixture(scope="module")
def standing_ranks(tmp_path_factory):
    """Ranks of a file alone: what it imports, and ZeRO-3 for good, changes torch for the others."""
    with ranks_of_sizes(tmp_path_factory.mktemp) as of:
        yield of
