# SPDX-License-Identifier: Apache-2.0
"""Train under DeepSpeed's ZeRO-2 with 8-bit optimizer states in host memory, and resume.

    deepspeed examples/deepspeed_zero2_offload.py
    torchrun --standalone --nproc-per-node 2 examples/deepspeed_zero2_offload.py

Without a GPU the model trains on the CPU.  Start it again and it resumes from its last checkpoint.
"""

import argparse
from pathlib import Path

import deepspeed
import torch

import zero8

CONFIG = Path(__file__).with_suffix(".json")


def main() -> None:
    """Resume if there is a checkpoint, train, and save one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="to take in this run")
    parser.add_argument("--out", default="runs/example_deepspeed", help="folder of checkpoints")
    parser.add_argument("--local_rank", type=int, help="passed by the deepspeed launcher")
    arguments = parser.parse_args()

    torch.manual_seed(0)  # the same weights on every rank
    layers = torch.nn.Linear(128, 512), torch.nn.Tanh(), torch.nn.Linear(512, 128)
    model = torch.nn.Sequential(*layers)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=str(CONFIG)
    )
    zero8.assert_active(engine)
    if Path(arguments.out).is_dir():
        engine.load_checkpoint(arguments.out)  # the tag that `latest` names
    first, rank = engine.global_steps, torch.distributed.get_rank()

    for step in range(first, first + arguments.steps):
        torch.manual_seed(1000 * step + rank)  # every rank has data of its own
        inputs = torch.randn(engine.train_micro_batch_size_per_gpu(), 128).to(engine.device)
        loss = torch.nn.functional.mse_loss(engine(inputs), inputs.roll(1, dims=1))
        engine.backward(loss)
        engine.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    engine.save_checkpoint(arguments.out)  # complete or not there: zero8 adds a manifest
    if rank == 0:
        print(engine.basic_optimizer.memory_report())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
