# SPDX-License-Identifier: Apache-2.0
"""What test_hf_recipes.py runs on its ranks: transformers' Trainer with a recipe of configs/hf."""

import torch
from shared_memory import leave_out_shared_memory
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import zero8

leave_out_shared_memory()  # without LOCAL_SIZE it would not be called

SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
LLAMA = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, **SIZES)


def train(path, output, arguments):
    """Train a tiny Llama with a recipe and arguments of the Trainer; return what came of it."""
    args = TrainingArguments(
        output_dir=output,
        deepspeed=path,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **arguments,
    )
    torch.manual_seed(7)
    windows = (torch.arange(128).unsqueeze(1) + torch.arange(16)) % 128
    trainer = Trainer(
        model=LlamaForCausalLM(LLAMA),
        args=args,
        train_dataset=[{"input_ids": window, "labels": window} for window in windows],
    )
    trainer.train()
    engine = trainer.model_wrapped
    zero8.assert_active(engine)
    logged = [row for row in trainer.state.log_history if "loss" in row]
    groups = engine.basic_optimizer.param_groups
    return {
        "losses": [row["loss"] for row in logged],
        "lrs": [row["learning_rate"] for row in logged],
        "groups": [
            {key: group[key] for key in ("betas", "eps", "weight_decay")} for group in groups
        ],
        "clipping": engine.gradient_clipping(),
        "batches": (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        ),
        "dtype": str(engine.get_data_types()[0]),
        "stage": engine.zero_optimization_stage(),
        "offload": str(engine.zero_offload_optimizer().device),
        "state bytes": engine.basic_optimizer.memory_report().state_bytes_per_param(bits=8),
    }
