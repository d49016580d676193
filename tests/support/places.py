# SPDX-License-Identifier: Apache-2.0
"""Where the checkout, the tests and what they share are."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
FOLDERS = [str(path) for path in sorted(TESTS.iterdir()) if path.is_dir()]
"""For the PYTHONPATH of processes that import tests."""
