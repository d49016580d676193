# SPDX-License-Identifier: Apache-2.0
"""For torchtitan; needs torchtitan 0.3."""

from dataclasses import dataclass

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.utils import init_optim_state

from zero8.optimizer.elementwise import OPTIMIZERS


class Adam8bitContainer(OptimizersContainer):
    """torchtitan's container of optimizers, whose config can also name zero8's.

    Checkpoints have torchtitan's flat names and can be resharded.  Checkpoints of AdamW load if
    `optimizer_factory_kwargs_by_name` sets `state_dict_format="fp32"`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's config, nested here because a config builds its enclosing class."""

    @staticmethod
    def _resolve_optimizer_factory(name: str):
        for optimizer in OPTIMIZERS:
            if name == optimizer.__name__:
                return optimizer
        return OptimizersContainer._resolve_optimizer_factory(name)

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state dict of `state_dict`, by its names.

        torchtitan's method looks up the names of the live states, which are codes even if
        `state_dict_format` is "fp32".

        Raises:
            ValueError: if a state is missing or does not fit its parameter.
        """
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
            saved = optimizer.state_dict()
            for group in saved["param_groups"]:
                names = group["param_names"]
                for number, name in zip(group["params"], names, strict=True):
                    prefix = f"state.{name}."
                    saved["state"][number] = {
                        key: _entry(state_dict, prefix + key) for key in saved["state"][number]
                    }
                for key in group.keys() - {"params", "param_names"} if names else ():
                    group[key] = _entry(state_dict, f"param_groups.{names[0]}.{key}")
            optimizer.load_state_dict(saved)


def _entry(state_dict: dict, name: str) -> object:
    if name not in state_dict:
        raise ValueError(
            f"load_state_dict: got no {name}; a checkpoint of AdamW, or with "
            'state_dict_format="fp32", loads only with state_dict_format="fp32"'
        )
    return state_dict[name]
