# SPDX-License-Identifier: Apache-2.0
"""PyTorch's FSDP: the kinds of state of its sharded and flattened parameters."""
