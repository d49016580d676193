# SPDX-License-Identifier: Apache-2.0
"""The glue to DeepSpeed's ZeRO: registration, the state layout, the segment tables."""
