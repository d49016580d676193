# SPDX-License-Identifier: Apache-2.0
"""torch warns where nvcc is installed and no GPU is there: none of our processes prints that."""

import logging

import pytest

from zero8.op import build, cpp_extension

# A torch with CUDA, as `import torch.utils.cpp_extension` sees it.
WITH_CUDA = """
import torch
torch.version.cuda = "13.0"
torch.cuda._is_compiled, torch.cuda.is_available = lambda: True, lambda: False
"""
# Where TORCH_EXTENSIONS_DIR is set, zero8 does not ask the module for its folder.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TORCH_EXTENSIONS_DIR": None}
WARNING = "No CUDA runtime is found, using CUDA_HOME"


@pytest.fixture
def printed(forks, tmp_path):
    """Return a function: of code, what it writes to stderr where there is nvcc and no GPU."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    # The folder that the module then names: with the op, which would compile for half a minute.
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "torch_extensions").symlink_to(build.cache_root())
    folders = {"CUDA_HOME": str(tmp_path), "XDG_CACHE_HOME": str(cache)}

    def of(code):
        done = forks.run(WITH_CUDA + code, **folders, **ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return of


def test_torch_prints_the_warning_itself(printed):
    """Guards the test below."""
    assert WARNING in printed("import torch.utils.cpp_extension")


@pytest.mark.parametrize(
    "code",
    [
        "import zero8; from zero8.op import build; build.cache_root()",
        "from examples.gpt import engine_deepspeed",  # which imports deepspeed
        "from zero8 import cli; assert cli.main(['doctor']) == 0",
    ],
)
def test_our_processes_print_no_warning_of_a_missing_cuda_runtime(code, printed):
    end = "\nimport torch.utils.cpp_extension as c; assert c.CUDA_HOME"
    assert WARNING not in printed(code + end)


def test_other_warnings_of_the_module_are_printed(printed):
    code = """
import logging
from zero8.op import cpp_extension
logger = logging.getLogger("torch.utils.cpp_extension")
cpp_extension.imported().logger.warning("another")
logger.warning("No CUDA runtime is found, later")
"""
    lines = printed(code)
    assert "another" in lines and "No CUDA runtime is found, later" in lines


def test_filter_keeps_other_records():
    record = logging.makeLogRecord({"msg": "gcc is too old for this torch"})
    assert cpp_extension._is_another(record)
