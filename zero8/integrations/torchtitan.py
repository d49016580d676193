# SPDX-License-Identifier: Apache-2.0
"""For torchtitan; needs torchtitan 0.3."""

from dataclasses import dataclass

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.utils import init_optim_state

from zero8.optimizer import OPTIMIZERS


class Adam8bitContainer(OptimizersContainer):
    """torchtitan's container of optimizers, in whose configs zero8's have names.

    Checkpoints have torchtitan's flat names, and are resharded as its own.  Those of AdamW load
    where `optimizer_factory_kwargs_by_name` sets `state_dict_format="fp32"`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As torchtitan's; a config builds the container in which its class stands."""

    @staticmethod
    def _resolve_optimizer_factory(name: str):
        for optimizer in OPTIMIZERS:
            if name == optimizer.__name__:
                return optimizer
        return OptimizersContainer._resolve_optimizer_factory(name)

    def load_state_dict(self, state_dict: dict) -> None:
        """Load what `state_dict` returns, by the names that it gives.

        torchtitan's own goes by those of the live states, which are codes in either format.

        Raises:
            ValueError: if a state does not fit its parameter, or is not there.
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
            f"load_state_dict: got no {name}; a checkpoint of AdamW, or of "
            'state_dict_format="fp32", loads with state_dict_format="fp32" only'
        )
    return state_dict[name]
