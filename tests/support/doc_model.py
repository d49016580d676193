# SPDX-License-Identifier: Apache-2.0
"""What readers of the docs have: a model, data, and transformers' classes.

Scripts that run blocks of the pages begin with everything from here.  The Llama is the one that
docs/moving.md was run with; row n of the data counts upwards from n.
"""

from functools import partial

import torch
import transformers
from hf_models import WITH_END, counting, small_llama, tokenizer
from shared_memory import leave_out_shared_memory
from transformers import LlamaForCausalLM, Trainer

__all__ = [
    "LlamaForCausalLM",
    "Trainer",
    "TrainingArguments",
    "data",
    "new_model",
    "on_the_cpu",
    "save_base",
    "torch",
]

leave_out_shared_memory()  # without LOCAL_SIZE it would not be called

data = [{"input_ids": row, "labels": row} for row in counting(64)]
new_model = partial(small_llama, hidden_size=256, intermediate_size=512, **WITH_END)


def on_the_cpu(arguments):
    """Return a class of arguments for a machine without a GPU, which does not report anywhere."""
    return partial(arguments, use_cpu=True, report_to=[], logging_steps=1, disable_tqdm=True)


TrainingArguments = on_the_cpu(transformers.TrainingArguments)


def save_base(folder: str) -> None:
    """Save the model with its tokenizer, as a hub has them."""
    tokenizer().save_pretrained(folder)
    new_model().save_pretrained(folder)
