# SPDX-License-Identifier: Apache-2.0
"""Writes torchao_4bit.pt, _8bit.pt and _fp8.pt: checkpoints of its optimizers, and their moments.

Run with torchao 0.18.0 installed: `python tests/golden/write_torchao.py`.  The moments are put into
states of its own classes and quantized by them; a step would have them compiled.
"""

from pathlib import Path

import torch
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

SHAPES = {"rows of blocks": (8, 512), "rows across blocks": (32, 136), "small": (7, 9)}


def write(name: str, optimizer_class: type) -> None:
    """Write the state dict of an optimizer, and the moments that its states decode to."""
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    optimizer = optimizer_class(params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    decoded = []
    for p in params:
        state, moments = {"step": torch.tensor(17.0)}, {}
        for which in ("exp_avg", "exp_avg_sq"):
            is_signed = which == "exp_avg"
            spread = torch.exp2(-20 * torch.rand(p.shape, generator=generator))
            x = torch.randn(p.shape, generator=generator) * spread
            x = x if is_signed else x.square()
            state[which] = optimizer._new_buffer(p, is_signed).copy_(x)
            is_quantized = p.numel() >= 4096
            moments[which] = state[which].dequantize() if is_quantized else x
        optimizer.state[p] = state
        decoded.append(moments)
    content = {"optimizer": optimizer.state_dict(), "moments": decoded}
    torch.save(content, Path(__file__).parent / f"torchao_{name}.pt")


if __name__ == "__main__":
    write("4bit", AdamW4bit)
    write("8bit", AdamW8bit)
    write("fp8", AdamWFp8)
