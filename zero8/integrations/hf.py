# SPDX-License-Identifier: Apache-2.0
"""For Hugging Face's Trainer, TRL's trainers and Accelerate; needs transformers.

With a DeepSpeed config none of this is needed: name the optimizer there.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from zero8.optimizer import Adam8bitBlockwise


def optimizer(args: TrainingArguments, **settings) -> tuple[Callable, dict[str, Any]]:
    """Return what Trainer takes as `optimizer_cls_and_kwargs`.

        Trainer(model, args, optimizer_cls_and_kwargs=hf.optimizer(args), ...)

    Trainer then makes an `Adam8bitBlockwise` of the model's parameters with their names, so that
    `fp32_params` finds them and the dither is the same whatever else is trained.

    Args:
        args: of the Trainer: its learning rate, betas, epsilon and weight decay are taken.
        **settings: keywords of `Adam8bitBlockwise`; they have precedence.
    """
    from_args = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    # Trainer calls what is no class without arguments, and what it gets then with the model.
    return lambda: _made, from_args | settings


def named_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return a model's trained parameters with their names, in the two groups that Trainer makes.

        optimizer = zero8.Adam8bitBlockwise(hf.named_groups(model, 0.1), lr=1e-4)

    Args:
        model: before it is wrapped or prepared.
        weight_decay: of all but biases and norms, which are not decayed.
    """
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {
            "params": [(name, p) for name, p in trained if (name in decayed) is is_decayed],
            "weight_decay": weight_decay if is_decayed else 0.0,
        }
        for is_decayed in (True, False)
    ]


def _made(model: torch.nn.Module, *, weight_decay: float, **settings) -> Adam8bitBlockwise:
    return Adam8bitBlockwise(named_groups(model, weight_decay), **settings)
