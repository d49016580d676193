# SPDX-License-Identifier: Apache-2.0
"""Command line of one training run; launch/local.sh starts it under torchrun."""

import argparse
import os
import sys
from pathlib import Path

from examples.gpt.engine import (
    DEEPSPEED,
    DEFAULTS,
    FLOAT32,
    FSDP2,
    INT8,
    TWINS,
    WEIGHTS,
    check_weights,
    defaults,
)
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
    parser.add_argument(
        "--optimizer", choices=[*TWINS, *TWINS.values()], default="Adam8bitBlockwise"
    )
    parser.add_argument(
        "--engine", choices=DEFAULTS, help=f"default: {DEEPSPEED}, with --weights {INT8} {FSDP2}"
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default=FLOAT32,
        help=f"the format of the linear layers' weights; default: {FLOAT32}",
    )
    parser.add_argument("--codec", choices=CODECS, help="of zero8's states; default: the config's")
    pairs = [pair for of_engine in DEFAULTS.values() for pair in of_engine.values()]
    configs, folders = zip(*pairs, strict=True)
    parser.add_argument("--config", type=Path, help=f"default: {' or '.join(configs)}")
    parser.add_argument("--model", choices=MODELS, default="demo", help="its size")
    parser.add_argument("--data", help="file or folder; default: Python's standard library")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out",
        type=Path,
        help=f"folder for the result; default: {' or '.join(folders)}",
    )
    parser.add_argument(
        "--save-every",
        type=int,
        metavar="STEPS",
        help="from checkpoint to checkpoint; default: there is one, of the end",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest complete checkpoint in OUT, of any number of ranks; without "
        "it, those of an earlier run of the optimizer there are deleted",
    )
    arguments = parser.parse_args()
    arguments.engine = arguments.engine or (FSDP2 if arguments.weights == INT8 else DEEPSPEED)
    try:
        config, out = defaults(arguments.engine, arguments.optimizer)
        check_weights(arguments.weights, arguments.engine, arguments.optimizer)
    except ValueError as error:
        parser.error(str(error))
    arguments.config = arguments.config or Path(config)
    endings = [arguments.codec, INT8 if arguments.weights == INT8 else None]
    arguments.out = arguments.out or Path("-".join(filter(None, [out, *endings])))
    arguments.save_every = arguments.steps if arguments.save_every is None else arguments.save_every
    for name in ("steps", "save_every"):
        if (value := getattr(arguments, name)) < 1:
            parser.error(f"got --{name.replace('_', '-')} {value}, expected at least 1")
    if arguments.data and arguments.out.resolve().is_relative_to(Path(arguments.data).resolve()):
        parser.error(
            f"got --out {arguments.out} inside --data {arguments.data}, expected it elsewhere: the "
            "second run would train on the first one's result"
        )
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
