# SPDX-License-Identifier: Apache-2.0
"""Command line of one training run; launch/local.sh starts it under torchrun."""

import argparse
import logging
import os
import sys
from pathlib import Path

from examples.gpt.config import FLOAT32, INT8, TWINS, is_of_fsdp2, load_config
from examples.gpt.model import MODELS
from examples.gpt.run import engine_class, train
from zero8.environment import extras
from zero8.spec.codec import CODECS


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = argparse.ArgumentParser(
        prog="python -m torch.distributed.run --standalone -m examples.gpt", description=__doc__
    )
    add = made.add_argument
    add("--optimizer", choices=[*TWINS, *TWINS.values()], default="Adam8bitBlockwise")
    add("--weights", choices=(FLOAT32, INT8), default=FLOAT32, help="of the linear layers")
    add("--codec", choices=CODECS, help="of zero8's states; default: the config's")
    help_text = ".json for DeepSpeed, .toml for FSDP2; default: %(default)s"
    add("--config", type=Path, default=Path("configs/zero2_offload.json"), help=help_text)
    add("--model", choices=MODELS, default="demo", help="its size")
    add("--data", help="file or folder; default: Python's standard library")
    add("--steps", type=int, default=400, help="optimizer steps")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/demo"), help="folder; default: %(default)s")
    help_text = "between checkpoints; default: one at the end"
    add("--save-every", type=int, metavar="STEPS", help=help_text)
    help_text = "go on from the newest complete checkpoint in OUT, of any number of ranks; without "
    help_text += "it, those of an earlier run of the optimizer there are deleted"
    add("--resume", action="store_true", help=help_text)
    add("--build", action="store_true", help="only compile what ranks would wait for")
    return made


def log_warnings(path: Path) -> None:
    """Send warnings of this process to a new file; errors still show on the screen, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file, screen = logging.FileHandler(path, mode="w"), logging.StreamHandler()
    screen.setLevel(logging.ERROR)
    for name in ("py.warnings", "DeepSpeed", "torchao"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [file, screen]
        logger.propagate = False
    logging.captureWarnings(True)


def main() -> None:
    """Parse the arguments and train."""
    made = parser()
    arguments = made.parse_args()
    ours_in_fsdp2 = is_of_fsdp2(arguments.config) and arguments.optimizer in TWINS
    if arguments.weights == INT8 and not ours_in_fsdp2:
        made.error(f"got {INT8} weights, expected {FLOAT32}: zero8's optimizers step them in FSDP2")
    with extras.explained("python -m examples.gpt"):
        config = load_config(arguments.config, arguments.optimizer, arguments.codec)
        if arguments.build:
            from examples.gpt.engine_deepspeed import build

            build(config)
            return
        if "LOCAL_RANK" not in os.environ:
            made.error("no LOCAL_RANK in the environment: start it with torchrun (see the usage)")
        engine_class(arguments.config)  # imports the framework, which makes loggers of its own
        log_warnings(arguments.out / f"{arguments.optimizer}.rank{os.environ['RANK']}.log")
        train(arguments, config)
    # Not through the interpreter's shutdown: a thread of gloo may drop the tensor of the last
    # collective only then, which ends it within a destructor, and so aborts the process (PyTorch
    # 2.13, ProcessGroupGloo::runLoop).  DeepSpeed keeps the groups, so destroying them, which would
    # join the threads, does not end them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
