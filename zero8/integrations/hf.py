# SPDX-License-Identifier: Apache-2.0
"""For Hugging Face's Trainer, TRL's trainers and Accelerate; needs transformers.

With a DeepSpeed config the optimizer is named there, and of this only `Monitor` is of use.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from zero8.integrations.health import Reports
from zero8.optimizer import Adam8bitBlockwise


def optimizer(args: TrainingArguments, **settings: Any) -> tuple[Callable, dict[str, Any]]:
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
    groups: list[dict[str, Any]] = []
    for is_decayed in (True, False):
        params = [(name, p) for name, p in trained if (name in decayed) is is_decayed]
        # Adapters have neither biases nor norms.  Trainer's AdamW has the empty group, too, and its
        # checkpoints load into as many; torch asks of it for names, as of all.
        names = {} if params else {"param_names": []}
        decay = weight_decay if is_decayed else 0.0
        groups.append({"params": params, "weight_decay": decay, **names})
    return groups


def _made(model: torch.nn.Module, *, weight_decay: float, **settings) -> Adam8bitBlockwise:
    return Adam8bitBlockwise(named_groups(model, weight_decay), **settings)


class Monitor(TrainerCallback):
    """Has Trainer log the health of the optimizer, at every n-th step.

        trainer = Trainer(model, args, optimizer_cls_and_kwargs=hf.optimizer(args), ...)
        trainer.add_callback(hf.Monitor(trainer, every=50))

    Then it is in `trainer.state.log_history`, and in all that `report_to` names: TensorBoard shows
    it as `train/zero8/...`.  Each rank logs its own values, and of those Trainer writes rank 0's.
    `zero8.integrations.health` says what they are.

    Trainer calls its own callbacks before others, and keeps a copy of a log before all: what a
    callback adds to a log reaches neither.  So these are logs of their own.
    """

    def __init__(self, trainer: Trainer, every: int = 50):
        """Log through this Trainer; training then raises ValueError with another optimizer."""
        self._trainer, self._every = trainer, every
        self._reports: Reports | None = None

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        """Begin to take the time of steps."""
        self.on_train_end(args, state, control)  # of a training that an error has ended
        self._reports = Reports(optimizer, self._every)

    def on_step_end(self, args, state, control, **kwargs):
        """Log what there is to report."""
        if values := self._reports.after(state.global_step):
            due = control.should_log
            # Not a subclass's: TRL's trainers empty what they have gathered for their next log.
            Trainer.log(self._trainer, values)
            control.should_log = due  # the log of the loss, of which Trainer takes this to be one

    def on_train_end(self, args, state, control, **kwargs):
        """Take no more time."""
        if self._reports is not None:
            self._reports.close()
