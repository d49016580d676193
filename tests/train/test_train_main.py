# SPDX-License-Identifier: Apache-2.0
"""What a rank says and refuses: warnings in a file, errors on the screen too."""

import pytest
from places import ROOT

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


INT8_RUN = """
import sys
from examples.gpt.__main__ import main
sys.modules["torchao"] = None  # as where it is not installed
sys.argv = ["examples.gpt", "--weights", "int8", *{words!r}]
main()
"""
FSDP2 = ["--config", str(ROOT / "configs" / "fsdp2_offload.toml"), "--data", str(ROOT / "zero8")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got int8 weights, expected float32"),
        ([*FSDP2, "--optimizer", "AdamW"], "got int8 weights, expected float32"),
        (FSDP2, "needs torchao: pip install 'zero8[torchao]'"),
    ],
    ids=["DeepSpeed", "AdamW", "no torchao"],
)
def test_int8_weights_that_cannot_be_trained_are_refused(forks, tmp_path, words, message):
    checkpoint = tmp_path / "Adam8bitBlockwise.checkpoint"
    checkpoint.mkdir()
    code = INT8_RUN.format(words=[*words, "--out", str(tmp_path)])
    done = forks.run(code, RANK="0", LOCAL_RANK="0")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert checkpoint.is_dir()
