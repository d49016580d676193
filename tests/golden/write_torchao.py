# SPDX-License-Identifier: Apache-2.0
"""Writes torchao_*.pt: states of torchao's optimizers and weights of its classes, and their values.

Run with torchao 0.18.0 installed: `python tests/golden/write_torchao.py`.  Moments are put into
states of its own classes and quantized by them, as a step would have them compiled; weights are
stepped by zero8.
"""

from pathlib import Path

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.prototype.quantized_training import (
    bitnet_training,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
)
from torchao.quantization import quantize_

from zero8 import Adam8bitBlockwise

SHAPES = {"rows of blocks": (8, 512), "rows across blocks": (32, 136), "small": (7, 9)}
QUANTIZED = {
    "int8": (int8_weight_only_quantized_training(), torch.float32),
    "int8_bfloat16": (int8_weight_only_quantized_training(), torch.bfloat16),
    "int8_matmuls": (int8_mixed_precision_training(), torch.float32),
    "bitnet": (bitnet_training(), torch.bfloat16),
}


def states_of(optimizer_class: type) -> dict:
    """Return the state dict of an optimizer, and the moments that its states decode to."""
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
    return {"optimizer": optimizer.state_dict(), "moments": decoded}


def weights() -> dict:
    """Return the state dicts of a model and its optimizer, and the model's values."""
    torch.manual_seed(1)
    names = (*QUANTIZED, "float8")
    model = nn.ModuleDict({name: nn.Linear(104, 40, bias=False) for name in names})
    for name, (config, dtype) in QUANTIZED.items():
        quantize_(model[name].to(dtype), config)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name == "float8", config=config
    )
    optimizer = Adam8bitBlockwise(model.named_parameters(), lr=1e-2)
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(p.dtype)
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "values": {name: values_of(p) for name, p in model.named_parameters()},
    }


def values_of(p: nn.Parameter) -> torch.Tensor:
    """Return what a forward reads: of INT8 weights code times scale, else what is held inside."""
    held = {part: getattr(p, part) for part in p.__tensor_flatten__()[0]}
    if "int_data" in held:
        return held["int_data"] * held["scale"].float().unsqueeze(1)
    return held.get("_data", held.get("_tensor")).clone()


if __name__ == "__main__":
    for name, content in {
        "4bit": states_of(AdamW4bit),
        "8bit": states_of(AdamW8bit),
        "fp8": states_of(AdamWFp8),
        "weights": weights(),
    }.items():
        torch.save(content, Path(__file__).parent / f"torchao_{name}.pt")
