# SPDX-License-Identifier: Apache-2.0
"""The demonstration job: the same small byte-level GPT trained with AdamW and Adam8bitBlockwise."""

from zero8.op import cpp_extension

# DeepSpeed imports it too, and each rank would print its warning.
cpp_extension.imported()
