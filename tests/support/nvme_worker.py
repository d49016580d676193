# SPDX-License-Identifier: Apache-2.0
"""A model and a config whose sub-groups ZeRO-3 swaps to a disk, and access to what is swapped."""

from contextlib import contextmanager

import torch
from zero_worker import base_optimizer, config, make_engine, moments_of, parameters_of, plain

BF16_MASTERS = {"bf16_master_weights_and_grads": True}
# Two matrices are Muon's, the third AdamW's.
MUON = {"optimizer": "Muon8bitBlockwise", "adam_params": ["*embed*", "*outer*"]}


class Tower(torch.nn.Module):
    """Three matrices that are large enough to be swapped on two ranks, and a tail that is not.

    With `sub_group_size` 500 000 each matrix ends a sub-group of its own; `head.bias` is the tail.
    Most sizes are odd: parts have padding, and begin where no disk sector does.
    """

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(67, 1041)
        self.inner = torch.nn.Linear(1041, 1062)
        self.outer = torch.nn.Linear(1062, 1041)
        self.norm = torch.nn.LayerNorm(1041)
        self.head = torch.nn.Linear(1041, 1061)

    def forward(self, tokens, targets):
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.outer(torch.tanh(self.inner(hidden))))
        logits = self.head(hidden)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class TowerWithAMatrix(Tower):
    """A Tower with a matrix in the tail, whose moments are 8-bit and in memory."""

    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(1061, 5, bias=False)

    def forward(self, tokens, targets):
        loss = super().forward(tokens, targets)
        return loss + self.last(torch.ones(1061)).square().mean()


SUB_GROUPS = 4
SWAPPED = 3


def swapped_elements():
    """Return the elements of the swapped sub-groups on one rank of two."""
    tail = Tower().head.bias.numel()
    return (sum(p.numel() for p in Tower().parameters()) - tail) / 2


def nvme_config(folder, dtype=None, pipelined=False, aio=None, **options):
    """Return a config that swaps to a folder; `folder` None keeps everything in memory."""
    zero = {"sub_group_size": 500_000, "stage3_param_persistence_threshold": 0}
    if folder is not None:
        zero["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": str(folder),
            "pin_memory": False,
            "buffer_count": 12,
            "pipeline_read": pipelined,
            "pipeline_write": pipelined,
        }
    offload = "cpu" if folder is None else None
    made = config(stage=3, offload=offload, dtype=dtype, zero=zero, **options)
    return made | {"gradient_clipping": 1.0, "aio": aio or {}}


def make_tower(ds_config, model_class=Tower):
    """Return an engine over a freshly seeded Tower."""
    torch.manual_seed(7)
    return make_engine(ds_config, model_class())


def swapper_of(engine):
    """Return what swaps an engine's optimizer states."""
    return engine.optimizer.optimizer_swapper


@contextmanager
def swapped_in(zero, number):
    """Have a sub-group in memory."""
    swapped = zero._swappable_optimizer_subgroup(number)
    if swapped:
        zero._optimizer_states_and_gradient_swap_in(number)
    yield zero.fp32_partitioned_groups_flat[number]
    if swapped:
        zero._release_swap_buffers(number)


def held_everywhere(engine):
    """Return copies of the parameters and of every sub-group's weights and state, padding aside."""
    zero, states = engine.optimizer, []
    for number in range(len(zero.fp16_groups)):
        with swapped_in(zero, number) as p:
            state = base_optimizer(engine).state.get(p, {})
            entry = {key: plain(value) for key, value in state.items()}
            entry["master"] = torch.zeros(p.shape, dtype=p.dtype)
            entry["pieces"] = moments_of(state)[0].store.table.pieces if state else ()
            for piece in entry["pieces"]:
                here = slice(piece.start, piece.start + piece.numel)
                entry["master"][here] = p.detach()[here]
            states.append(entry)
    return {"parameters": parameters_of(engine), "states": states}
