# SPDX-License-Identifier: Apache-2.0
"""What readers of the docs have: a model, data, and transformers' classes.

Scripts that run blocks of the pages begin with everything from here.  The Llama is the one that
docs/moving.md was run with; row n of the data counts upwards from n.
"""

from functools import partial

import torch
import transformers
from shared_memory import leave_out_shared_memory
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer

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

VOCABULARY = 256
config = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=VOCABULARY,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=VOCABULARY - 1,
    pad_token_id=VOCABULARY - 1,
)
rows = (torch.arange(64)[:, None] + torch.arange(16)) % 64
data = [{"input_ids": row, "labels": row} for row in rows]


def on_the_cpu(arguments):
    """Return a class of arguments for a machine without a GPU, which does not report anywhere."""
    return partial(arguments, use_cpu=True, report_to=[], logging_steps=1, disable_tqdm=True)


TrainingArguments = on_the_cpu(transformers.TrainingArguments)


def new_model() -> LlamaForCausalLM:
    """Return the model, the same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def save_base(folder: str) -> None:
    """Save the model with a tokenizer of the words w0, w1 and so on, as a hub has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(VOCABULARY - 2)}
    words |= {"<unk>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    new_model().save_pretrained(folder)
