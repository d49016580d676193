# SPDX-License-Identifier: Apache-2.0
"""Imports torch's cpp_extension without its warning of machines that have nvcc and no GPU.

The warning ("No CUDA runtime is found, using CUDA_HOME=...") is logged once in each process that
imports the module, so once per rank, and asks for nothing: the CPU kernel needs no CUDA.
"""

import logging
from types import ModuleType

_LOGGER = "torch.utils.cpp_extension"
_WARNING = "No CUDA runtime is found"


def imported() -> ModuleType:
    """Return `torch.utils.cpp_extension`; its import takes a while, as it imports setuptools."""
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(_is_another)
    try:
        from torch.utils import cpp_extension
    finally:
        logger.removeFilter(_is_another)
    return cpp_extension


def _is_another(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_WARNING)
