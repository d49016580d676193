# SPDX-License-Identifier: Apache-2.0
"""PyTorch's FSDP: the kinds of state of what it puts in the place of parameters."""
