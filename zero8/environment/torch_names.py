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
    """A private name of torch."""

    module: str
    name: str  # in the module, with dots if it is in a class or a submodule
    use: str  # what zero8 does with it, as a verb phrase
    parameters: tuple[str, ...] = ()  # those that zero8 passes by name

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


_OPTIMIZER, _PLACEMENTS = "torch.optim.optimizer", "torch.distributed.tensor.placement_types"
_SPEC = "torch.distributed.tensor._dtensor_spec"
_SPLIT = ("with_padding", "contiguous")

NAMES = (
    PrivateName("torch._compile", "_disable_dynamo", "keeps steps out of compiled graphs"),
    PrivateName("torch", "_C._disabled_torch_function_impl", "keeps moments from being wrapped"),
    PrivateName("torch", "_C.DisableTorchFunctionSubclass", "has buffers act as plain tensors"),
    PrivateName("torch", "_C._set_throw_on_mutable_data_ptr", "keeps moments' addresses secret"),
    PrivateName("torch", "_C._DisableAutocast", "keeps the arithmetic of steps out of autocast"),
    PrivateName("torch", "Tensor._make_wrapper_subclass", "makes the tensors of moments"),
    PrivateName(_OPTIMIZER, "_global_optimizer_pre_hooks", "notices hooks of all steps"),
    PrivateName(_OPTIMIZER, "_global_optimizer_post_hooks", "notices hooks of all steps"),
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
    PrivateName(_SPEC, "DTensorSpec", "makes the DTensors of states"),
    PrivateName(_SPEC, "TensorMeta", "makes the DTensors of states"),
    PrivateName(_PLACEMENTS, "_StridedShard", "recognizes shards of rows that are not consecutive"),
    PrivateName(_PLACEMENTS, "Shard._split_tensor", "computes which rows a rank holds", _SPLIT),
    PrivateName("torch.distributed", "ProcessGroup._device_types", "chooses a reduction's device"),
)


def missing() -> list[PrivateName]:
    """Return the names that the installed torch lacks."""
    return [name for name in NAMES if not name.is_there()]
