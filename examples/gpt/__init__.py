# SPDX-License-Identifier: Apache-2.0
"""The demonstration job: the same small byte-level GPT trained in fp32 and with 8-bit states."""
