# SPDX-License-Identifier: Apache-2.0
"""The kind of state of FSDP1's flattened parameters.

They have no block grid, so their moments stay float32.  FSDP1 saves only tensors of the parameter's
shape and dtype, so checkpoints have the states of torch's AdamW.
"""

from torch import Tensor

from zero8.state.params import ParamInfo
from zero8.state.tell import tell_once
from zero8.state.whole import WholeTensor


def is_flattened(p: Tensor) -> bool:
    """Return whether FSDP1 has flattened a parameter."""
    return getattr(p, "_fsdp_flattened", False)


class FlattenedTensor(WholeTensor):
    """The state of a parameter of FSDP1, with or without `use_orig_params`."""

    raises_alone = False  # gradients differ between ranks, which wait for each other in collectives
    remark = ", flattened by FSDP1"

    def serves(self, p: Tensor, state: dict) -> bool:
        """See `StateKind`."""
        return is_flattened(p)

    def check_new(self, p: Tensor, info: ParamInfo) -> None:
        """See `StateKind`."""
        tell_once(
            "zero8: parameters that FSDP1 has flattened keep float32 moments, 8 bytes per element; "
            "FSDP2 (torch.distributed.fsdp.fully_shard) allows 8-bit moments, 2.05 bytes"
        )

    def saved(self, p: Tensor, state: dict, info: ParamInfo | None, in_fp32: bool) -> dict:
        """See `StateKind`."""
        return super().saved(p, state, info, in_fp32=True)
