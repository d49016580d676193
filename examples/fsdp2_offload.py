# SPDX-License-Identifier: Apache-2.0
"""Train under PyTorch's FSDP2 with 8-bit optimizer states in host memory, and resume.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2_offload.py

Without a GPU the model trains on the CPU.  Start it again, with any number of ranks, and it resumes
from its last checkpoint.
"""

import argparse
import os

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import zero8
from zero8.files import tagged


def main() -> None:
    """Resume if there is a checkpoint, train, and save one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="to take in this run")
    parser.add_argument("--out", default="runs/example_fsdp2", help="folder of checkpoints")
    arguments = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    rank = torch.distributed.get_rank()

    torch.manual_seed(0)  # the same weights on every rank
    layers = torch.nn.Linear(128, 512), torch.nn.Tanh(), torch.nn.Linear(512, 128)
    model = torch.nn.Sequential(*layers)
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=gpu))
    optimizer = zero8.Adam8bitBlockwise(model.named_parameters(), lr=3e-3, weight_decay=0.01)

    first = 0
    if tag := tagged.newest(arguments.out):  # raises if its files are damaged
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=tag)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        first = int(tag.name.removeprefix("step"))

    for step in range(first, first + arguments.steps):
        torch.manual_seed(1000 * step + rank)  # every rank has data of its own
        inputs = torch.randn(16, 128).to(device)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    with tagged.saving(arguments.out, f"step{first + arguments.steps}", keep=2) as tag:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tag)
    if rank == 0:
        print(optimizer.memory_report())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
