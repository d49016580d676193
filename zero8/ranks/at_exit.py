# SPDX-License-Identifier: Apache-2.0
"""Time for gloo's threads at the end of a process."""

import atexit
import functools
import time

_PAUSE_S = 0.1


@functools.cache
def leave_time_for_gloo() -> None:
    """Make this process pause for 0.1 s before it ends.

    A thread of gloo drops the tensors of a collective after the ranks have the result, and takes
    Python's lock for that. If Python ends in between, torch aborts the process, and launchers
    report a failed training (https://github.com/pytorch/pytorch/issues/190489). The last
    collective before the end is often one of `save_checkpoint`'s. `destroy_process_group` does not
    end the threads while an engine or a mesh still holds the group.
    """
    atexit.register(time.sleep, _PAUSE_S)
