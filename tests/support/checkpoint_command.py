# SPDX-License-Identifier: Apache-2.0
"""Runs `zero8 checkpoint` in the test's own process."""

import json

from zero8.cli import main


def called(capsys, *argv, status=0):
    """Run a command with --json; return its JSON object."""
    capsys.readouterr()  # what else has been printed before, such as by DeepSpeed's converter
    assert main(["checkpoint", *map(str, argv), "--json"]) == status
    return json.loads(capsys.readouterr().out)
