# SPDX-License-Identifier: Apache-2.0
"""LoRA on a tiny Llama, for the ranks of test_peft_trl.py: Trainer and TRL."""

import os
import warnings
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from hf_models import WITH_END, arguments, counting, small_llama, tokenizer
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from shared_memory import leave_out_shared_memory
from transformers import BitsAndBytesConfig, LlamaForCausalLM, Trainer, TrainerCallback
from transformers.integrations.deepspeed import (
    is_deepspeed_zero3_enabled,
    unset_hf_deepspeed_config,
)

import zero8
from zero8.integrations import hf

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore", FutureWarning)
leave_out_shared_memory()  # without LOCAL_SIZE it would not be called

SAVED_AT = 3
# The dropout needs the state of the generators in a checkpoint.
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}


def lora():
    return LoraConfig(task_type="CAUSAL_LM", **LORA)


def new_base(base, folder):
    """Return the base model, the same each time: in "float32", "bfloat16" or bitsandbytes' "4bit".

    A quantized one lies in a folder in between.  Matrices of LoRA are (16, 512) and (512, 16).
    """
    model = small_llama(hidden_size=512, intermediate_size=512, num_attention_heads=8, **WITH_END)
    if base != "4bit":
        return model.to(getattr(torch, base))
    if not folder.exists():  # not by save_pretrained, which leaves it to rank 0
        model.config.save_pretrained(folder)
        save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return LlamaForCausalLM.from_pretrained(
        folder,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
        ),
        device_map=None if is_deepspeed_zero3_enabled() else {"": "cpu"},
    )


def same(one, other):
    return one.keys() == other.keys() and all(
        t.dtype == other[name].dtype and torch.equal(t, other[name]) for name, t in one.items()
    )


def found_in(optimizer, adapters, losses):
    """Return what the test judges."""
    rows = optimizer.memory_report().to_dicts()
    return {
        "losses": losses,
        "trained": sum(getattr(p, "ds_numel", p.numel()) for p in adapters),
        "dtypes": {str(p.dtype) for p in adapters},
        "bits": {row["bits"] for row in rows},
        "shapes": {tuple(row["shape"]) for row in rows},
        "numel": sum(row["numel"] for row in rows),
        "bytes": sum(row["state_bytes"] for row in rows),
    }


class CountSteps(TrainerCallback):
    """Notes the steps that a Trainer really takes."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, **_):
        self.steps.append(state.global_step)


def new_trainer(kind, ds_config, base, folder, output):
    """Return transformers' Trainer, or TRL's SFTTrainer for "sft", of adapters on a fresh base.

    `ds_config` is the path of a DeepSpeed config, None for DistributedDataParallel.
    """
    if ds_config is None:
        # What the Trainer before has left: TRL and Accelerate ask for it.
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        unset_hf_deepspeed_config()
    AcceleratorState._reset_state(True)
    options = {"deepspeed": ds_config, "bf16": False, "logging_steps": 1, "seed": 3}
    windows = counting(96)
    if kind == "trainer":
        args = arguments(output, **options)
        own = own_optimizer(args)
        torch.manual_seed(11)
        model = get_peft_model(new_base(base, folder / "base"), lora())
        data = [{"input_ids": window, "labels": window} for window in windows]
        return Trainer(model=model, args=args, train_dataset=data, **own)
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [{"text": " ".join(f"w{token}" for token in window)} for window in windows.tolist()]
    args = arguments(output, SFTConfig, max_length=32, **options)
    return SFTTrainer(
        model=new_base(base, folder / "base"),
        args=args,
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer(),
        peft_config=lora(),
        **own_optimizer(args),
    )


def own_optimizer(args) -> dict:
    """Return what gives a Trainer our optimizer where no DeepSpeed config does."""
    return {} if args.deepspeed is not None else {"optimizer_cls_and_kwargs": hf.optimizer(args)}


def by_trainer(folder, kind, ds_config, base):
    """Train adapters with a Trainer that saves, and once more from the checkpoint in the middle."""
    folder = Path(folder)
    own = folder / os.environ["RANK"]
    own.mkdir()
    trainer = new_trainer(kind, ds_config, base, own, folder / "run")
    trainer.train()
    trainer.save_model(str(folder / "straight"))
    optimizer, filled = trainer.optimizer.optimizer, None
    if ds_config is not None:
        engine = trainer.model_wrapped
        zero8.assert_active(engine)
        optimizer = engine.basic_optimizer
        filled = engine.gradient_clipping(), engine.train_micro_batch_size_per_gpu()
    again = new_trainer(kind, ds_config, base, own, folder / "again")
    again.add_callback(counter := CountSteps())
    again.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{SAVED_AT}"))
    again.save_model(str(folder / "resumed"))
    torch.distributed.barrier()
    straight, resumed = (
        load_file(folder / name / "adapter_model.safetensors") for name in ("straight", "resumed")
    )
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    group = optimizer.param_groups[0]
    return {
        **found_in(optimizer, [p for p in trainer.model.parameters() if p.requires_grad], losses),
        "settings": (tuple(group["betas"]), group["eps"], group["weight_decay"]),
        "filled": filled,
        "resumes": same(resumed, straight),
        "resumed steps": counter.steps,
    }
