# SPDX-License-Identifier: Apache-2.0
"""Command line of one training run; launch/local.sh starts it under torchrun."""

import argparse
import os
import sys
from pathlib import Path

from examples.gpt.engine import DEEPSPEED, DEFAULTS, FLOAT32, FSDP2, INT8, TWINS, defaults
from examples.gpt.model import MODELS
from examples.gpt.run import train
from zero8 import extras
from zero8.spec.codec import CODECS


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(
        prog="python -m torch.distributed.run --standalone -m examples.gpt",
        description=main.__doc__,
    )
    add = parser.add_argument
    add("--optimizer", choices=[*TWINS, *TWINS.values()], default="Adam8bitBlockwise")
    add("--engine", choices=DEFAULTS, help=f"default: {DEEPSPEED}, with INT8 weights {FSDP2}")
    add("--weights", choices=(FLOAT32, INT8), default=FLOAT32, help="of the linear layers")
    add("--codec", choices=CODECS, help="of zero8's states; default: the config's")
    add("--config", type=Path, help="default: that of launch/local.sh")
    add("--model", choices=MODELS, default="demo", help="its size")
    add("--data", help="file or folder; default: Python's standard library")
    add("--steps", type=int, default=400, help="optimizer steps")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder for the result; default: that of launch/local.sh")
    add(
        "--save-every",
        type=int,
        metavar="STEPS",
        help="between checkpoints; default: one at the end",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the newest complete checkpoint in OUT, of any number of ranks; without "
        "it, those of an earlier run of the optimizer there are deleted",
    )
    arguments = parser.parse_args()
    arguments.engine = arguments.engine or (FSDP2 if arguments.weights == INT8 else DEEPSPEED)
    try:
        config, out = defaults(arguments.engine, arguments.optimizer, arguments.weights)
    except ValueError as error:
        parser.error(str(error))
    arguments.config = arguments.config or Path(config)
    endings = [arguments.codec, INT8 if arguments.weights == INT8 else None]
    arguments.out = arguments.out or Path("-".join(filter(None, [out, *endings])))
    arguments.save_every = arguments.steps if arguments.save_every is None else arguments.save_every
    if min(arguments.steps, arguments.save_every) < 1:
        parser.error("got --steps or --save-every below 1, expected at least 1")
    if arguments.data and arguments.out.resolve().is_relative_to(Path(arguments.data).resolve()):
        parser.error(f"got --out {arguments.out} inside --data, which would train on results")
    if "LOCAL_RANK" not in os.environ:
        parser.error("no LOCAL_RANK in the environment: start it with torchrun (see the usage)")
    with extras.explained("python -m examples.gpt"):
        train(**vars(arguments))
    # Not through the interpreter's shutdown: a thread of gloo may drop the tensor of the last
    # collective only then, which ends it within a destructor, and so aborts the process (PyTorch
    # 2.13, ProcessGroupGloo::runLoop).  DeepSpeed keeps the groups, so destroying them, which would
    # join the threads, does not end them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
