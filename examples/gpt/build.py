# SPDX-License-Identifier: Apache-2.0
"""Builds the ops of a run before it starts: `python -m examples.gpt.build CONFIG [OPTIMIZER ...]`.

Ranks would build them, too, but what they say while it takes minutes is in their logs.
"""

import sys
from pathlib import Path

from examples.gpt.config import load_config
from zero8.algorithms.table import ALGORITHMS
from zero8.op.build import op_for_steps
from zero8.zero import ops


def main() -> None:
    """Build what runs with some optimizers, or Adam's, need; or end with what is missing."""
    path, *optimizers = sys.argv[1:]
    try:
        for optimizer in optimizers or ("Adam8bitBlockwise", "AdamW"):
            build_for(Path(path), optimizer)
    except RuntimeError as error:
        sys.exit(f"zero8: {error}")


def build_for(path: Path, optimizer: str) -> None:
    """Build what a run with one optimizer needs.

    Raises:
        RuntimeError: if this machine lacks something.
    """
    config = load_config(path, optimizer, steps=0)
    names = ops.needed(config, ops.accelerator())
    ops.check(names)
    for algorithm in ALGORITHMS:
        if algorithm.class_name == optimizer:
            op_for_steps(algorithm).load()
    for name in names:
        if name != ops.SHARED_MEMORY:  # which DeepSpeedEngine leaves out
            print("op {op}: {path} ({seconds:.1f} s)".format(**ops.build(name)), flush=True)


if __name__ == "__main__":
    main()
