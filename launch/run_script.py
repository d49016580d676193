#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a script, or with -m a module, inside the rank that rank.py watches.

Every process group gets a time limit, ZERO8_TIMEOUT_S, for making it and for meeting the other
ranks.  A rank that waits for one that hangs, or whose host is gone, ends when that has passed.
`init_process_group` and `deepspeed.init_distributed` give theirs to the world's group only: the
group in which DeepSpeed reduces gradients keeps PyTorch's 30 minutes on gloo.  And gloo honours no
limit while it connects a group.

Signs of life go to the pipe ZERO8_SIGN_FD.

One file, as a module of its own beside it could hide one of the script's.
"""

import os
import runpy
import sys
import time
from datetime import timedelta
from functools import wraps
from inspect import signature
from pathlib import Path
from threading import Thread

from torch.distributed import distributed_c10d

SIGN_EVERY_S = 1.0


def main() -> None:
    """Run what the command line names, in this process."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    name, *rest = arguments[is_module:]
    groups = limit_groups(timedelta(seconds=float(os.environ["ZERO8_TIMEOUT_S"])))
    give_signs(int(os.environ["ZERO8_SIGN_FD"]), groups)
    # As Python itself would: the current folder comes first for a module, for a script its own.
    sys.argv = [name, *rest]
    if is_module:
        sys.path[0] = os.getcwd()
        # Last, as only the modules of the checkout that nothing else provides are meant.
        sys.path.append(str(Path(__file__).resolve().parents[1]))
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


# --- Time limits of process groups ---------------------------------------------------------------


class Groups:
    """The group that is being made, if one is, and since when.

    Attributes:
        limit: the longest time that making one, or waiting in one, may take.
    """

    def __init__(self, limit: timedelta):
        """No group is being made yet."""
        self.limit = limit
        self._began: float | None = None

    def check(self) -> None:
        """End this process, with what to look at, if making a group takes longer than the limit."""
        began = self._began
        if began is None or time.monotonic() - began < self.limit.total_seconds():
            return
        names = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        found = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
        print(
            f"TimeoutError: zero8: no process group within {self.limit.total_seconds():.0f} s: are "
            f"all hosts up, and do they reach each other by {found}?",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # the main thread is inside of gloo, where no exception reaches it


def limit_groups(limit: timedelta) -> Groups:
    """Let no process group of this process wait for longer than `limit`; return what makes them.

    Raises:
        RuntimeError: if this PyTorch makes groups in another way than those that are known.
    """
    make = getattr(distributed_c10d, "_new_process_group_helper", None)
    meet = getattr(distributed_c10d, "rendezvous", None)
    if make is None or "timeout" not in signature(make).parameters or meet is None:
        raise RuntimeError(
            "this PyTorch makes process groups in a way that launch/run_script.py does not know"
        )
    groups = Groups(limit)

    @wraps(meet)
    def met(*args, timeout=limit, **kwargs):
        return meet(*args, timeout=min(timeout, limit), **kwargs)

    @wraps(make)
    def limited(*args, **kwargs):
        bound = signature(make).bind(*args, **kwargs)
        asked = bound.arguments.get("timeout")
        bound.arguments["timeout"] = limit if asked is None else min(asked, limit)
        groups._began = time.monotonic()
        try:
            return make(*bound.args, **bound.kwargs)
        finally:
            groups._began = None

    distributed_c10d._new_process_group_helper = limited
    distributed_c10d.rendezvous = met
    return groups


# --- Signs of life -------------------------------------------------------------------------------


def give_signs(descriptor: int, groups: Groups) -> None:
    """Write a byte a second to a pipe, from a thread, for as long as this process runs.

    A process that is stopped, or that has held the interpreter's lock for long, writes none.
    """
    # Not for the processes that this one starts: the pipe ends with the rank.
    os.set_inheritable(descriptor, False)
    Thread(target=_give, args=(descriptor, groups), name="zero8 signs of life", daemon=True).start()


def _give(descriptor: int, groups: Groups) -> None:
    while True:
        try:
            os.write(descriptor, b".")
        except BrokenPipeError:
            return  # the watching process ends this one
        groups.check()
        time.sleep(SIGN_EVERY_S)


if __name__ == "__main__":
    main()
