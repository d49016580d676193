# SPDX-License-Identifier: Apache-2.0
"""What zero8 logs, for processes in which pytest's caplog is not at hand."""

import logging
from contextlib import contextmanager

from zero8.state.tell import tell_once


@contextmanager
def warned():
    """Yield the list of what is logged in the block."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    tell_once.cache_clear()
    logging.getLogger("zero8").addHandler(handler)
    yield lines
    logging.getLogger("zero8").removeHandler(handler)
