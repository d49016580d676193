# SPDX-License-Identifier: Apache-2.0
"""For Hugging Face's Trainer, TRL's trainers and Accelerate; needs transformers.

With a DeepSpeed config, which names the optimizer, only `Monitor` is useful.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from zero8.integrations.health import Reports
from zero8.optimizer.blockwise import BlockwiseOptimizer
from zero8.optimizer.elementwise import OPTIMIZERS
from zero8.spec.shown import shown

_KINDS = {one.algorithm.name: one for one in OPTIMIZERS}


def optimizer(
    args: TrainingArguments, kind: str = "adam", **settings: Any
) -> tuple[Callable, dict[str, Any]]:
    """Return the argument `optimizer_cls_and_kwargs` for Trainer.

        Trainer(model, args, optimizer_cls_and_kwargs=hf.optimizer(args), ...)

    Trainer then makes the optimizer from the model's named parameters, so that `fp32_params`
    applies and the dither does not depend on the order of parameters.

    Args:
        args: the Trainer's; supplies learning rate, betas, epsilon and weight decay, as far as the
            optimizer takes them.  As in Trainer's own Lion, `adam_beta1` and `adam_beta2` are
            Lion's betas, too.
        kind: "adam" for `Adam8bitBlockwise`, "lion", "sgd", "ademamix" or "muon".
        **settings: keywords of the optimizer; they override `args`.

    Raises:
        ValueError: for another kind.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind: got {shown(kind)}, expected one of {list(_KINDS)}")
    made = _KINDS[kind]
    more_betas = made.algorithm.options.get("betas", ())[2:]
    from_args = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2, *more_betas),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    # Trainer calls a factory that is not a class, and calls its result with the model.
    taken = {key: from_args[key] for key in from_args if key in made.algorithm.keywords}
    return lambda: partial(_made, made), taken | settings


def named_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return a model's trained parameters with their names, in Trainer's two groups.

        optimizer = zero8.Adam8bitBlockwise(hf.named_groups(model, 0.1), lr=1e-4)

    Args:
        model: before it is wrapped or prepared.
        weight_decay: for all parameters but biases and norms, which are not decayed.
    """
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = []
    for is_decayed in (True, False):
        params = [(name, p) for name, p in trained if (name in decayed) is is_decayed]
        # The second group is empty for adapters, which have neither biases nor norms.  It is kept,
        # as checkpoints of Trainer's AdamW have it; torch requires names in it, too.
        names = {} if params else {"param_names": []}
        decay = weight_decay if is_decayed else 0.0
        groups.append({"params": params, "weight_decay": decay, **names})
    return groups


def _made(
    made: type[BlockwiseOptimizer], model: torch.nn.Module, *, weight_decay: float, **settings: Any
) -> BlockwiseOptimizer:
    return made(named_groups(model, weight_decay), **settings)


class Monitor(TrainerCallback):
    """Has Trainer log the health of the optimizer, every `every` steps.

        trainer = Trainer(model, args, optimizer_cls_and_kwargs=hf.optimizer(args), ...)
        trainer.add_callback(hf.Monitor(trainer, every=50))

    The values (`zero8.integrations.health.health`) are in `trainer.state.log_history` and in the
    integrations of `report_to`: TensorBoard shows them as `train/zero8/...`.  Each rank logs its
    own, and Trainer writes rank 0's.

    They are logged separately, because values that a callback adds to an existing log reach neither
    the history nor Trainer's own callbacks.
    """

    def __init__(self, trainer: Trainer, every: int = 50):
        """Log through this Trainer; with another optimizer, training raises ValueError."""
        self._trainer, self._every = trainer, every
        self._reports: Reports | None = None

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        """Start the timing of steps."""
        self.on_train_end(args, state, control)  # if an error ended the last training
        self._reports = Reports(optimizer, self._every)

    def on_step_end(self, args, state, control, **kwargs):
        """Log the report, if one is due."""
        if values := self._reports.after(state.global_step):
            due = control.should_log
            # Trainer's, not a subclass's: TRL's would clear the metrics gathered for its next log.
            Trainer.log(self._trainer, values)
            control.should_log = due  # Trainer resets it, as if the loss had been logged

    def on_train_end(self, args, state, control, **kwargs):
        """Stop the timing."""
        if self._reports is not None:
            self._reports.close()
