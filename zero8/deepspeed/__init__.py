# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO: registration, the state of a flat partition, its segment table."""
