# SPDX-License-Identifier: Apache-2.0
"""What a rank says: warnings in a file, errors on the screen too."""

SPEAK = """
import logging, sys, warnings
from pathlib import Path
from deepspeed.utils import logger
from examples.gpt.__main__ import log_warnings
log_warnings(Path(sys.argv[1]))
warnings.warn("a captured warning", FutureWarning)
logger.warning("a warning of DeepSpeed")
logger.error("an error of DeepSpeed")
"""


def test_warnings_are_in_the_file_and_errors_on_the_screen(forks, tmp_path):
    path = tmp_path / "new" / "rank0.log"
    done = forks.run(SPEAK, str(path))
    screen, file = done.stdout + done.stderr, path.read_text()
    for line in ("a captured warning", "a warning of DeepSpeed"):
        assert line in file and line not in screen
    assert "an error of DeepSpeed" in file and "an error of DeepSpeed" in screen
