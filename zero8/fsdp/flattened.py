# SPDX-License-Identifier: Apache-2.0
"""The kind of state of what FSDP1 makes of parameters: one dimension, of one or of many of them.

It has no block grid, so its moments stay float32.  FSDP1 saves no tensors but of the parameter's
shape and dtype, so checkpoints carry what torch's AdamW would.
"""

from torch import Tensor

from zero8.state.params import ParamInfo
from zero8.state.tell import tell_once
from zero8.state.whole import WholeTensor


class FlattenedTensor(WholeTensor):
    """States of FSDP1's parameters, with `use_orig_params` and without."""

    raises_alone = False  # ranks meet different gradients, and wait for each other in collectives
    remark = ", flattened by FSDP1"

    def serves(self, p: Tensor, state: dict) -> bool:
        """See `StateKind`."""
        return getattr(p, "_fsdp_flattened", False)

    def check_new(self, p: Tensor, info: ParamInfo) -> None:
        """See `StateKind`."""
        tell_once(
            "zero8: parameters that FSDP1 has flattened keep float32 moments, 8 bytes per element; "
            "under FSDP2 (torch.distributed.fsdp.fully_shard) they are 8-bit, 2.05 bytes"
        )

    def saved(self, p: Tensor, state: dict, in_fp32: bool) -> dict:
        """See `StateKind`."""
        return super().saved(p, state, in_fp32=True)
