# SPDX-License-Identifier: Apache-2.0
"""The hooks of other programs for an optimizer, each with its recipe of docs/integrations.md.

The programs are the packages of the page's table.  Of most only the files run that make the
optimizer: the `__init__` files around them import much that is not installed (`bare`).
"""

import importlib
import logging
import re
import shlex
import sys
from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import hf_models
import pytest
import torch
import yaml
from hf_models import BETAS, LR, WEIGHT_DECAY
from places import ROOT

from zero8 import Adam8bitBlockwise

pytestmark = pytest.mark.integrations

EMBEDDING_LR = 3e-4


class Made(NamedTuple):
    """The optimizer that a program steps, ours inside, and what it should have."""

    program: torch.optim.Optimizer
    ours: torch.optim.Optimizer
    params: list[torch.Tensor]
    groups: list[tuple[int, float, float]]  # the number of parameters, lr and weight decay
    betas: tuple[float, float] = BETAS


@pytest.fixture
def program(tmp_path, monkeypatch):
    """What the functions below take."""
    return SimpleNamespace(folder=tmp_path, patch=monkeypatch, model=hf_models.small_llama())


def in_its_config(name: str) -> str:
    """Return what the page's table has in a program's config."""
    page = (ROOT / "docs" / "integrations.md").read_text()
    (found,) = re.findall(rf"^\| {name} \d.*\| `(.*)` \|$", page, re.MULTILINE)
    return found


def bare(patch, *names: str) -> None:
    """Let packages be imported without their `__init__`."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if parent:
            folders = [str(Path(folder, leaf)) for folder in sys.modules[parent].__path__]
        else:
            folders = list(find_spec(name).submodule_search_locations)
        package = ModuleType(name)
        package.__path__ = folders
        patch.setitem(sys.modules, name, package)


def names_only(patch, name: str) -> None:
    """Put a module in place of one that is imported and not used here; it has every name."""
    module = ModuleType(name)
    module.__getattr__ = lambda _: logging.getLogger  # most ask for a logger
    patch.setitem(sys.modules, name, module)


# --- As the programs make it ---------------------------------------------------------------------


def by_axolotl(block, program) -> Made:
    """As `load_cfg`, `train` and the trainer do."""
    plugins = importlib.import_module("axolotl.integrations.base")
    bare(program.patch, *("axolotl.core", "axolotl.core.trainers", "axolotl.core.trainers.mixins"))
    mixin = importlib.import_module("axolotl.core.trainers.mixins.optimizer").OptimizerMixin
    (program.folder / "zero8_plugin.py").write_text(block.text)
    program.patch.syspath_prepend(program.folder)
    args = hf_models.arguments(program.folder)
    args.embedding_lr = EMBEDDING_LR
    args.loraplus_lr_ratio = args.embedding_lr_scale = args.lr_groups = None
    manager = plugins.PluginManager.get_instance()
    for name in yaml.safe_load(in_its_config("axolotl"))["plugins"]:
        manager.register(name)
    trainer = mixin(program.model, args, train_dataset=hf_models.Texts())
    manager.post_trainer_create(manager.cfg, trainer)
    made = trainer.create_optimizer()
    groups = [(14, LR, WEIGHT_DECAY), (2, EMBEDDING_LR, 0.0), (5, LR, 0.0)]
    return Made(made, made, list(program.model.parameters()), groups)


def by_llama_factory(block, program) -> Made:
    """As `BaseTrainer` does; training is not started, as the script is not `__main__`."""
    exec(block.text, {"__name__": "train"})
    config = importlib.import_module("llamafactory.v1.config.arg_utils")
    base = importlib.import_module("llamafactory.v1.core.base_trainer").BaseTrainer
    given = yaml.safe_load(in_its_config("LLaMA-Factory"))["optim_config"]
    args = SimpleNamespace(optim_config=config.get_plugin_config(given))
    trainer = SimpleNamespace(model=program.model, args=args)
    base._init_optimizer(trainer)
    made = trainer.optimizer
    groups = [(21, given["lr"], given["weight_decay"])]
    return Made(made, made, list(program.model.parameters()), groups, tuple(given["betas"]))


def by_ms_swift(block, program) -> Made:
    """As `SwiftMixin` does."""
    bare(program.patch, "swift")
    names_only(program.patch, "swift.utils")
    names_only(program.patch, "swift.trainers")
    exec(block.text, {})
    optimizers = importlib.import_module("swift.optimizers").optimizers_map
    *_, option, name = in_its_config("ms-swift").split()
    assert option == "--optimizer"
    trainer = hf_models.trainer(program.folder, program.model)
    made = optimizers[name](trainer.args, trainer).create_optimizer(model=None)
    made.param_groups = [group for group in made.param_groups if group["params"]]
    groups = [(16, LR, WEIGHT_DECAY), (5, LR, 0.0)]
    return Made(made, made, list(program.model.parameters()), groups)


def by_verl(block, program) -> Made:
    """As the engine of FSDP does; hydra, which is not here, would merge the words as OmegaConf."""
    from omegaconf import OmegaConf

    bare(program.patch, "verl", "verl.workers", "verl.workers.config")
    module = importlib.import_module("verl.workers.config.optimizer")
    (folder,) = sys.modules["verl"].__path__
    whole = OmegaConf.load(Path(folder, "trainer", "config", "_generated_ppo_trainer.yaml"))
    OmegaConf.set_struct(whole, True)  # a key that verl does not have raises
    words = [word for word in shlex.split(block.text) if "=" in word]
    prefix = "actor_rollout_ref.actor."
    words += [f"{prefix}optim.{word}" for word in (f"lr={LR}", f"weight_decay={WEIGHT_DECAY}")]
    words.append(f"{prefix}optim.betas={list(BETAS)}")
    actor = OmegaConf.merge(whole, OmegaConf.from_dotlist(words)).actor_rollout_ref.actor
    assert (actor.strategy, actor.fsdp_config.offload_policy) == ("fsdp2", True)
    given = {key: value for key, value in actor.optim.items() if key != "_target_"}
    params = list(program.model.parameters())
    made = module.build_optimizer(iter(params), module.FSDPOptimizerConfig(**given))
    return Made(made, made, params, [(21, LR, WEIGHT_DECAY)])


class OnGpu(torch.nn.Parameter):
    """A parameter on the CPU that Megatron takes for one on a GPU."""

    is_cuda = True

    def cpu(self):
        return self.detach().as_subclass(torch.Tensor).clone()


class Stream:
    """A stream of a GPU on which there is nothing to wait for."""

    def wait_stream(self, stream):
        pass

    def record_event(self):
        return SimpleNamespace(wait=self.wait_stream, synchronize=lambda: None)


def stand_in_for_gpu(patch) -> None:
    unpinned = torch.empty

    def empty(*size, pin_memory=False, **others):
        return unpinned(*size, **others)

    patch.setattr(torch, "empty", empty)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "current_stream", Stream)
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def by_megatron(block, program) -> Made:
    """In groups with some of the keys that Megatron's have."""
    stand_in_for_gpu(program.patch)
    params = [OnGpu(p.detach().bfloat16()) for p in program.model.parameters()]
    matrices, vectors = ([p for p in params if (p.dim() > 1) is two] for two in (True, False))
    groups = [
        {"params": matrices, "wd_mult": 1.0, "is_expert_parallel": False},
        {"params": vectors, "wd_mult": 0.0, "is_expert_parallel": False, "weight_decay": 0.0},
    ]
    found = {"groups": groups}
    exec(block.text, found)
    made = found["optimizer"]
    for group in made.param_groups:
        group["lr"] = LR  # as its schedule does
    (ours,) = made.cpu_optimizers
    assert all(p.dtype == torch.float32 for group in ours.param_groups for p in group["params"])
    return Made(made, ours, params, [(16, LR, 0.1), (5, LR, 0.0)], (0.9, 0.95))


MAKERS = {
    "BasePlugin": by_axolotl,
    "OptimizerPlugin": by_llama_factory,
    "optimizers_map": by_ms_swift,
    "verl.trainer": by_verl,
    "HybridDeviceOptimizer": by_megatron,
}
"""By what is in the recipe, the function that does what the program does."""


@pytest.mark.shown(
    "docs/integrations.md",
    "BasePlugin",
    "OptimizerPlugin",
    "optimizers_map",
    "main_ppo",
    "HybridDeviceOptimizer",
)
def test_recipe_of_a_program_makes_our_optimizer_with_its_settings_and_groups(block, program):
    (maker,) = [value for key, value in MAKERS.items() if key in block.text]
    made = maker(block, program)
    assert type(made.ours) is Adam8bitBlockwise

    before = [p.detach().clone() for p in made.params]
    for p in made.params:
        p.grad = torch.full_like(p, 0.01)
    made.program.step()
    for p, old in zip(made.params, before, strict=True):
        assert (p.detach() < old).all()

    groups = made.ours.param_groups
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in groups] == made.groups
    assert [tuple(group["betas"]) for group in groups] == [made.betas] * len(groups)
    bits = Counter(row.bits for row in made.ours.memory_report().rows)
    assert bits == {8: 16, 32: 5}  # matrices, norms
