# SPDX-License-Identifier: Apache-2.0
"""Makes a small state of `Adam8bitShared`, and says what it decodes to and how it goes on."""

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from zero8 import Adam8bitShared

STATE, EXPECTED = "plain_shared.pt", "plain_shared.json"
STEPS = 3
SETTINGS = {"lr": 1e-2, "weight_decay": 0.125, "block_size": 64, "min_8bit_size": 90}
# Two bands of 64 rows; a whole block and a short one; rows that are narrow; a vector.
SHAPES = {"bands": (66, 64), "ends": (3, 70), "narrow": (12, 8), "bias": (66,)}

Params = dict[str, nn.Parameter]


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return numbers over 12 octaves that are the same on every processor."""
    values = torch.arange(1, math.prod(shape) + 1) * (7919 + 2 * seed) % 251 - 125
    rows, columns = torch.arange(shape[0]) % 7, torch.arange(shape[-1]) % 5
    spread = torch.exp2(-(rows.view(-1, 1) + columns).float()) if shape[1:] else 1.0
    return values.view(shape) / 128 * spread


def made() -> tuple[Params, Adam8bitShared]:
    """Return the parameters and their optimizer before the first step."""
    params = {name: nn.Parameter(numbers(shape, 0)) for name, shape in SHAPES.items()}
    return params, Adam8bitShared(list(params.items()), **SETTINGS)


def step(params: Params, optimizer: Adam8bitShared, number: int) -> None:
    for name, p in params.items():
        p.grad = numbers(SHAPES[name], number)
    optimizer.step()


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def moments_of(params: Params, optimizer: Adam8bitShared) -> dict[str, list[str]]:
    """Return the digests of the decoded moments of each parameter."""
    return {
        name: [digest(store.read(0, p.numel())) for store in optimizer.moments(p)]
        for name, p in params.items()
    }


def gone_on(state_dict: dict) -> dict:
    """Load a state, take a step, and return the digests of weights and of moments."""
    params, optimizer = made()
    optimizer.load_state_dict(state_dict)
    step(params, optimizer, STEPS + 1)
    weights = {name: digest(p) for name, p in params.items()}
    return {"weights": weights, "moments": moments_of(params, optimizer)}


def write(folder: Path) -> None:
    """Write the state into a folder, and beside it what it decodes to and how it goes on."""
    params, optimizer = made()
    for number in range(1, STEPS + 1):
        step(params, optimizer, number)
    torch.save(optimizer.state_dict(), folder / STATE)
    moments = moments_of(params, optimizer)
    expected = {"moments": moments, "after a step": gone_on(optimizer.state_dict())}
    (folder / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n")
