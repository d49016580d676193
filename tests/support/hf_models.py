# SPDX-License-Identifier: Apache-2.0
"""Small models of Hugging Face's, their data, and Trainers of them; nothing is downloaded."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

VOCABULARY = 256
LR, WEIGHT_DECAY, BETAS, EPS = 1e-2, 0.1, (0.8, 0.95), 1e-7
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
WITH_END = {"bos_token_id": None, "eos_token_id": VOCABULARY - 1, "pad_token_id": VOCABULARY - 1}
"""What a model says whose texts come from `tokenizer`."""


def small_llama(**sizes) -> LlamaForCausalLM:
    """Return a Llama of two layers, the same each time."""
    torch.manual_seed(0)
    sizes = SIZES | sizes
    heads = sizes["num_attention_heads"]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            num_hidden_layers=2,
            num_key_value_heads=heads,
            max_position_embeddings=64,
            **sizes,
        )
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0, w1 and so on."""
    words = {f"w{number}": number for number in range(VOCABULARY - 2)}
    words |= {"<unk>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )


def tokens(seed: int, rows: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, 16), generator=generator)


def counting(number: int) -> torch.Tensor:
    """Return windows of a text that counts."""
    return (torch.arange(number)[:, None] + torch.arange(16)) % 64


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        row = tokens(number, 1)[0]
        return {"input_ids": row, "labels": row}


class StopAfter(TrainerCallback):
    """Ends a training early, as a job that is cut off does; the schedule is that of the whole."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.step


def arguments(folder, made=TrainingArguments, **others) -> TrainingArguments:
    return made(
        output_dir=str(folder),
        **{
            "per_device_train_batch_size": 4,
            "max_steps": 6,
            "learning_rate": LR,
            "weight_decay": WEIGHT_DECAY,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_epsilon": EPS,
            "report_to": [],
            "save_strategy": "steps",
            "save_steps": 3,
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **others,
        },
    )


def trainer(folder, model=None, stop_after=None, **others) -> Trainer:
    """Return a Trainer; `others` are arguments of it, or of `arguments`."""
    for_trainer = {
        k: others.pop(k) for k in ("optimizers", "optimizer_cls_and_kwargs") if k in others
    }
    args = others.pop("args", None) or arguments(folder, **others)
    return Trainer(
        model or small_llama(),
        args,
        train_dataset=Texts(),
        callbacks=[StopAfter(stop_after)] if stop_after else [],
        **for_trainer,
    )


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
