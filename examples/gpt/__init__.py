# SPDX-License-Identifier: Apache-2.0
"""The demonstration job: the same small byte-level GPT trained in fp32 and with 8-bit states."""

from zero8.op import cpp_extension

# DeepSpeed imports it too, and each rank would print its warning.
cpp_extension.imported()
