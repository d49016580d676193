# SPDX-License-Identifier: Apache-2.0
"""Training under DeepSpeed: a JSON config says how, the optimizer's type included."""

from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam

import zero8  # noqa: F401 - registers the optimizer type "Adam8bitBlockwise"
from zero8.train.config import load_config
from zero8.train.engine import Engine
from zero8.train.model import GPT
from zero8.zero.ops import leave_out_shared_memory


class DeepSpeedEngine(Engine):
    """See `Engine`."""

    adamw = DeepSpeedCPUAdam
    load_config = staticmethod(load_config)

    def __init__(self, model: GPT, settings: dict):
        """Start DeepSpeed."""
        leave_out_shared_memory()
        self.model = model
        self.module, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings
        )
        self.optimizer = self.module.basic_optimizer
        self.device = self.module.device
        self.micro_batch_size = self.module.train_micro_batch_size_per_gpu()
        self.accumulation_steps = self.module.gradient_accumulation_steps()

    def step(self, batches: list[torch.Tensor]) -> list[float]:
        """See `Engine`."""
        losses = []
        for batch in batches:
            loss = self.module(batch)
            self.module.backward(loss)
            self.module.step()
            losses.append(loss.item())
        return losses

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        self.module.save_checkpoint(str(folder))

    def synchronize(self) -> None:
        """See `Engine`."""
        get_accelerator().synchronize()
