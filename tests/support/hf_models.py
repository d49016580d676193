# SPDX-License-Identifier: Apache-2.0
"""A small model of Hugging Face's, its data, and Trainers of it; nothing is downloaded."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

VOCABULARY = 256
LR, WEIGHT_DECAY, BETAS, EPS = 1e-2, 0.1, (0.8, 0.95), 1e-7


def small_llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
        )
    )


def tokens(seed: int, rows: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, 16), generator=generator)


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


def arguments(folder, **others) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=LR,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        report_to=[],
        save_strategy="steps",
        save_steps=3,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **others,
    )


def trainer(folder, model=None, stop_after=None, callbacks=(), **others) -> Trainer:
    """Return a Trainer; `others` are arguments of it, or of `arguments`."""
    for_trainer = {
        k: others.pop(k) for k in ("optimizers", "optimizer_cls_and_kwargs") if k in others
    }
    args = others.pop("args", None) or arguments(folder, **others)
    stop = [StopAfter(stop_after)] if stop_after else []
    return Trainer(
        model or small_llama(),
        args,
        train_dataset=Texts(),
        callbacks=[*stop, *callbacks],
        **for_trainer,
    )


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
