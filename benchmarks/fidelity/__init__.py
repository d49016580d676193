# SPDX-License-Identifier: Apache-2.0
"""How far the 8-bit states are from float32: `make fidelity`."""
