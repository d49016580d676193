# SPDX-License-Identifier: Apache-2.0
"""The plot of `zero8 checkpoint inspect --plot`: how often each code is used."""

from pathlib import Path

import torch
from matplotlib.figure import Figure

from zero8.checkpoint.commands.param_counts import Found, ParamCounts
from zero8.checkpoint.read.statistics import order_of_codes

MOST_ROWS = 60
"""The number of parameters in the plot, the largest ones, so that rows stay readable."""


def plot(found: Found, path: Path) -> None:
    """Draw the share of each code for each moment, in total and per parameter.

    Codes are in the order of their values.

    Raises:
        ValueError: if there are no 8-bit moments.
    """
    params = {key: param for key, param in found.items() if param.block_size}
    if not params:
        raise ValueError("--plot: the checkpoint has no 8-bit moments")
    largest = sorted(params, key=lambda key: -params[key].numel)[:MOST_ROWS]
    rows = [key for key in params if key in largest]
    figure = Figure((12, 4 + 0.16 * len(rows)), layout="constrained")
    names = list(dict.fromkeys(name for key in rows for name in params[key].moments))
    axes = figure.subplots(2, len(names), height_ratios=(1, 0.25 + 0.06 * len(rows)), squeeze=False)
    for column, name in enumerate(names):
        having = [params[key] for key in rows if name in params[key].moments]
        shares = torch.stack([_shares(param, name) for param in having])
        weights = torch.tensor([float(param.numel) for param in having])
        total = (shares * weights[:, None]).sum(0) / weights.sum()
        top, below = axes[0][column], axes[1][column]
        top.bar(range(len(total)), 100 * total.numpy(), width=1.0, color="#4477aa")
        top.set(title=f"{name}: share of each code, %", xlim=(-0.5, len(total) - 0.5))
        logarithms = shares.clamp(min=1e-7).log10().numpy()
        image = below.imshow(logarithms, aspect="auto", interpolation="nearest", vmin=-7, vmax=-1)
        labels = [_label(key) for key in rows if name in params[key].moments]
        below.set_yticks(range(len(labels)), labels, fontsize=6)
        below.set_xlabel("codes, in the order of their values")
        figure.colorbar(image, ax=below, label="log10 of the share")
    figure.savefig(path, dpi=120)


def _shares(param: ParamCounts, name: str) -> torch.Tensor:
    counts = param.moments[name].codes[order_of_codes(param.code_of(name))]
    return counts.double() / max(1, int(counts.sum()))


def _label(key: tuple[str, str]) -> str:
    return "/".join(filter(None, key))[-40:]
