# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the ZeRO tests run."""

import os

import deepspeed
import torch

import zero8  # noqa: F401  registers the optimizer type


class Model(torch.nn.Module):
    """A small net with an embedding, odd sizes and tensors that stay float32."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(67, 96)
        self.inner = torch.nn.Linear(96, 131)
        self.norm = torch.nn.LayerNorm(131)
        self.head = torch.nn.Linear(131, 67, bias=False)

    def forward(self, tokens, targets):
        hidden = torch.tanh(self.inner(self.embed(tokens)))
        logits = self.head(self.norm(hidden))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def config(stage=2, offload="cpu", dtype=None, optimizer="Adam8bitBlockwise", zero=None, **params):
    """Return a DeepSpeed config."""
    made = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-2, "weight_decay": 0.01, **params}},
        "zero_optimization": {"stage": stage, **(zero or {})},
        "steps_per_print": 1000000,
    }
    if offload:
        made["zero_optimization"]["offload_optimizer"] = {"device": offload, "pin_memory": False}
    if dtype:
        made[dtype] = {"enabled": True}
    return made


def make_engine(ds_config):
    """Return an engine over a freshly seeded model."""
    torch.manual_seed(7)
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config
    )
    return engine


def batch(step, micro=4):
    """Return tokens and targets that depend on the step and the rank."""
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 60, (micro, 12), generator=generator)  # rows 60..66 are never used
    return tokens, (tokens * 7 + 3) % 67


def train(engine, steps, first=0):
    """Train and return the losses."""
    losses = []
    for step in range(first, first + steps):
        loss = engine(*batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(engine):
    """Return copies of the model's parameters."""
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def states(engine):
    """Return what the base optimizer holds, codes and scales as plain tensors."""
    held = []
    for state in engine.optimizer.optimizer.state.values():
        entry = {"step": state["step"], "history": state["history"]}
        for which in ("exp_avg", "exp_avg_sq"):
            store = state[which].store
            entry[which] = (store.codes.clone(), store.scales.clone(), store.dense.clone())
        entry["pieces"] = state["exp_avg"].store.table.pieces
        held.append(entry)
    return held


def train_and_report(ds_config, steps=5):
    """Train a few steps; return losses, weights, states and the memory report."""
    engine = make_engine(ds_config)
    losses = train(engine, steps)
    report = engine.optimizer.optimizer.memory_report().to_dicts()
    return {
        "losses": losses,
        "weights": weights(engine),
        "states": states(engine),
        "report": report,
    }


def losses_only(ds_config, steps=5):
    """Train a few steps with any optimizer; return the losses."""
    return train(make_engine(ds_config), steps)
