# SPDX-License-Identifier: Apache-2.0
"""Builds the ops of a run before it starts: `python -m examples.gpt.build CONFIG [OPTIMIZER ...]`.

Ranks would build them, too, but what they say while it takes minutes is in their logs.
"""

import argparse
import sys
from pathlib import Path

from examples.gpt.config import load_config
from zero8.algorithms.table import ALGORITHMS
from zero8.op.build import op_for_steps
from zero8.spec.codec import CODECS, DEFAULT_CODEC
from zero8.zero import ops


def main() -> None:
    """Build what runs with some optimizers need, or end with what is missing."""
    parser = argparse.ArgumentParser(prog="python -m examples.gpt.build", description=main.__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("optimizers", nargs="*", help="default: Adam8bitBlockwise and AdamW")
    parser.add_argument("--codec", choices=CODECS, help="of zero8's states; default: the config's")
    arguments = parser.parse_args()
    try:
        for optimizer in arguments.optimizers or ("Adam8bitBlockwise", "AdamW"):
            build_for(arguments.config, optimizer, arguments.codec)
    except RuntimeError as error:
        sys.exit(f"zero8: {error}")


def build_for(path: Path, optimizer: str, codec: str | None = None) -> None:
    """Build what a run with one optimizer needs; its codec is the config's if not given.

    Raises:
        RuntimeError: if this machine lacks something.
    """
    config = load_config(path, optimizer, steps=0, codec=codec)
    names = ops.needed(config, ops.accelerator())
    ops.check(names)
    chosen = CODECS[config["optimizer"]["params"].get("codec", DEFAULT_CODEC)]
    for algorithm in ALGORITHMS:
        if algorithm.class_name == optimizer:
            op_for_steps(algorithm, chosen).load()
    for name in names:
        if name != ops.SHARED_MEMORY:  # which DeepSpeedEngine leaves out
            print("op {op}: {path} ({seconds:.1f} s)".format(**ops.build(name)), flush=True)


if __name__ == "__main__":
    main()
