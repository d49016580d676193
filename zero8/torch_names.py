# SPDX-License-Identifier: Apache-2.0
"""The private names of torch that zero8 relies on: torch may change them in any release.

`tests/package/test_torch_names.py` finds each use in the sources and compares it with this table;
`zero8 doctor` looks the names up in the torch that is installed.
"""

import importlib
import inspect
from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True)
class PrivateName:
    """A private name of torch.

    Attributes:
        module: the module that has it.
        name: its name in the module, with dots if it is in a class or a submodule.
        use: what zero8 does with it, as a verb phrase.
        parameters: the parameters that zero8 passes by name.
    """

    module: str
    name: str
    use: str
    parameters: tuple[str, ...] = ()

    def is_there(self) -> bool:
        """Return whether the installed torch has the name, with these parameters."""
        try:
            found = attrgetter(self.name)(importlib.import_module(self.module))
        except (ImportError, AttributeError):
            return False
        return not self.parameters or set(self.parameters) <= set(
            inspect.signature(found).parameters
        )

    def __str__(self) -> str:
        """Return the full name."""
        return f"{self.module}.{self.name}"


NAMES = (
    PrivateName(
        "torch._compile", "_disable_dynamo", "keeps steps and state dicts out of compiled graphs"
    ),
    PrivateName(
        "torch", "_C._disabled_torch_function_impl", "keeps operations on moments from wrapping"
    ),
    PrivateName(
        "torch", "_C.DisableTorchFunctionSubclass", "lets buffers of weights act as plain tensors"
    ),
    PrivateName("torch", "Tensor._make_wrapper_subclass", "makes the tensors of moments"),
    *(
        PrivateName("torch.optim.optimizer", name, "notices hooks of all steps")
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    ),
    PrivateName(
        "torch",
        "_C._set_throw_on_mutable_data_ptr",
        "refuses code that would take a moment's address",
    ),
    PrivateName("torch", "_C._DisableAutocast", "keeps the arithmetic of steps out of autocast"),
    PrivateName(
        "torch.optim",
        "Optimizer._process_value_according_to_param_policy",
        "casts entries of other code as torch's load_state_dict does",
    ),
    PrivateName("torch.utils", "_pytree.tree_map_only", "finds moments among arguments"),
    PrivateName("torch.utils", "_pytree.tree_leaves", "finds tensors among results"),
    PrivateName(
        "torch.utils._python_dispatch",
        "is_traceable_wrapper_subclass",
        "recognizes tensors that must not have weak references",
    ),
    PrivateName(
        "torch.distributed.tensor._dtensor_spec", "DTensorSpec", "makes the DTensors of states"
    ),
    PrivateName(
        "torch.distributed.tensor._dtensor_spec", "TensorMeta", "makes the DTensors of states"
    ),
    PrivateName(
        "torch.distributed.tensor.placement_types",
        "_StridedShard",
        "recognizes shards whose rows are not consecutive",
    ),
    PrivateName(
        "torch.distributed.tensor.placement_types",
        "Shard._split_tensor",
        "computes which rows a rank holds",
        ("with_padding", "contiguous"),
    ),
    PrivateName(
        "torch.distributed", "ProcessGroup._device_types", "chooses the device of a reduction"
    ),
)


def missing() -> list[PrivateName]:
    """Return the names that the installed torch lacks."""
    return [name for name in NAMES if not name.is_there()]
