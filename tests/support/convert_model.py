# SPDX-License-Identifier: Apache-2.0
"""A model with parameters of every kind, whose gradients are the same in every framework."""

import torch
from fsdp_worker import run, whole
from torch import Tensor, nn
from zero_worker import Bag, pattern

import zero8
from zero8 import Adam8bitBlockwise

SHAPES = {
    "embed": (67, 96),  # tied; rows of one block of 96
    "wide": (20, 300),  # 256 + 44
    "conv": (6, 10, 9, 13),  # rows of 117: two dimensions kept
    "lora_b": (701, 8),  # blocks of 32 rows; the last has 29
    "small": (37, 41),  # fewer than 4096 elements: float32 moments
    "bias": (131,),  # one dimension: float32 moments
    "single": (1,),  # empty on most ranks
    "unused": (60, 70),  # never gets a gradient
    "frozen": (50, 90),  # does not want one
}
# Without weight decay, which ZeRO applies to what has no gradient too.
GROUPS = (
    {"names": ("embed", "lora_b", "small", "single", "unused"), "lr": 2e-2, "betas": (0.8, 0.99)},
    {"names": ("wide", "conv", "bias", "frozen"), "lr": 1e-2, "weight_decay": 0.25},
)
SAVED_AFTER, STEPS = 4, 7


class Mixed(Bag):
    """See SHAPES; the first has a second name in another module, and there is a buffer."""

    SHAPES = SHAPES

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        del self.tied
        self.to(dtype).head = nn.Module()
        self.head.weight = self.embed
        self.register_buffer("scale", torch.full((3,), 0.5))

    @staticmethod
    def pattern(name: str, shape: tuple[int, ...]) -> Tensor:
        """Return numbers of 4 bits: exact in bfloat16, and so are the means of three equal ones."""
        mantissa, exponent = torch.frexp(pattern(name, shape))
        return torch.ldexp((mantissa * 16).round() / 16, exponent)


def named_groups(model: nn.Module, only: set[str] | None = None, groups=GROUPS) -> list[dict]:
    """Return groups with the names of their parameters, those in `only` if given."""
    return [
        {
            **{key: value for key, value in group.items() if key != "names"},
            "params": [
                (name, getattr(model, name))
                for name in group["names"]
                if only is None or name in only
            ],
        }
        for group in groups
    ]


def results(model: nn.Module, optimizer) -> dict[str, dict]:
    """Return by parameter values and moments in float32, whole, in copies."""
    states = zero8.export(optimizer)["state"]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state_of = {p: states.get(number, {}) for number, p in enumerate(params)}
    found = {}
    for name, p in model.named_parameters():
        moments = {k: whole(v) for k, v in state_of.get(p, {}).items() if k.startswith("exp_avg")}
        found[name] = {"values": whole(p.detach()).float(), **moments}
    return found


def unnamed_groups(model: nn.Module, groups=GROUPS) -> list[dict]:
    named = named_groups(model, groups=groups)
    return [{**group, "params": [p for _, p in group["params"]]} for group in named]


def train(dtype=torch.float32, groups_of=named_groups, **keywords):
    """Return a model and its optimizer after `SAVED_AFTER` steps of one process."""
    model = Mixed(dtype)
    optimizer = Adam8bitBlockwise(groups_of(model), **keywords)
    run(model, optimizer, 0, SAVED_AFTER)
    return model, optimizer


def saved_plain(path, **keywords):
    """Save a file of one process after a few steps; return model and optimizer, as `train`."""
    model, optimizer = train(**keywords)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model, optimizer
