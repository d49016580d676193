# SPDX-License-Identifier: Apache-2.0
"""The demonstration job: the same small byte-level GPT trained with AdamW and Adam8bitBlockwise."""
