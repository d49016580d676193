# SPDX-License-Identifier: Apache-2.0
"""Writes torchao_weights.pt: weights of its classes, stepped by zero8, and what they decode to.

Run with torchao 0.18.0 installed: `python tests/golden/write_torchao_weights.py`.
"""

from pathlib import Path

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.quantized_training import (
    bitnet_training,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
)
from torchao.quantization import quantize_

from zero8 import Adam8bitBlockwise

QUANTIZED = {
    "int8": (int8_weight_only_quantized_training(), torch.float32),
    "int8_bfloat16": (int8_weight_only_quantized_training(), torch.bfloat16),
    "int8_matmuls": (int8_mixed_precision_training(), torch.float32),
    "bitnet": (bitnet_training(), torch.bfloat16),
}


def write() -> None:
    """Write the state dicts of a model and its optimizer, and the model's values."""
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
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "values": {name: values_of(p) for name, p in model.named_parameters()},
    }
    torch.save(content, Path(__file__).parent / "torchao_weights.pt")


def values_of(p: nn.Parameter) -> torch.Tensor:
    """Return what a forward reads: of INT8 weights code times scale, else what is held inside."""
    held = {part: getattr(p, part) for part in p.__tensor_flatten__()[0]}
    if "int_data" in held:
        return held["int_data"] * held["scale"].float().unsqueeze(1)
    return held.get("_data", held.get("_tensor")).clone()


if __name__ == "__main__":
    write()
