# SPDX-License-Identifier: Apache-2.0
"""Imports torch's cpp_extension without its warning on machines that have nvcc and no GPU.

The warning ("No CUDA runtime is found, using CUDA_HOME=...") would be logged once per rank, and is
irrelevant: the CPU kernel needs no CUDA.
"""

import logging
from types import ModuleType

_LOGGER = "torch.utils.cpp_extension"
_WARNING = "No CUDA runtime is found"


def imported() -> ModuleType:
    """Return `torch.utils.cpp_extension`, whose import is slow because it imports setuptools."""
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(_is_another)
    try:
        from torch.utils import cpp_extension
    finally:
        logger.removeFilter(_is_another)
    return cpp_extension


def _is_another(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_WARNING)
