# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, for one process."""

import resource
from contextlib import contextmanager


@contextmanager
def file_size_limit(num_bytes):
    """Let no file of this process grow beyond a size: to a program, a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
