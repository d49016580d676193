# SPDX-License-Identifier: Apache-2.0
"""LoRA's adapters train in 8 bits: with Trainer and with TRL's SFTTrainer.

The base models are float32, bfloat16, and bitsandbytes' 4-bit one of QLoRA; the configs of ZeRO are
those in configs/hf.
"""

import os
import warnings

import pytest
import torch
from accelerate.state import AcceleratorState
from hf_models import WITH_END, arguments, counting, small_llama, tokenizer
from nests import assert_same
from params import each
from peft import LoraConfig, get_peft_model
from places import ROOT
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from shared_memory import leave_out_shared_memory
from transformers import BitsAndBytesConfig, LlamaForCausalLM, Trainer, TrainerCallback
from transformers.integrations.deepspeed import (
    is_deepspeed_zero3_enabled,
    unset_hf_deepspeed_config,
)

import zero8
from zero8.environment.ranks import gathered
from zero8.integrations import hf

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore", FutureWarning)
leave_out_shared_memory()  # without LOCAL_SIZE it would not be called

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]

RANKS, STEPS, SAVED_AT = 2, 6, 3
TRAINED = 2 * 7 * 2 * 16 * 512
"""Elements of the adapters: of layers, of linear maps in each."""
MODES = {
    "Trainer, DDP, 4-bit": ("trainer", None, "4bit"),
    "Trainer, ZeRO-2": ("trainer", "zero2", "float32"),
    "Trainer, ZeRO-3, 4-bit": ("trainer", "zero3", "4bit"),
    "SFTTrainer, DDP": ("sft", None, "float32"),
    "SFTTrainer, ZeRO-2, bfloat16": ("sft", "zero2", "bfloat16"),
    "SFTTrainer, ZeRO-2, 4-bit": ("sft", "zero2", "4bit"),
    "SFTTrainer, ZeRO-3": ("sft", "zero3", "float32"),
}
"""What trains, the DeepSpeed config and the base model; by what is shown."""
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
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
        device_map=None if is_deepspeed_zero3_enabled() else {"": "cpu"},
    )


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


@each(MODES)
@on_ranks(RANKS, timeout_s=240)
def test_adapters_train_in_8_bits_and_resume_with_the_same_bits(name, tmp_path):
    """With a Trainer that saves, and once more from the checkpoint in the middle."""
    kind, config, base = MODES[name]
    path = config and str(ROOT / "configs" / "hf" / f"{config}_offload.json")
    own = tmp_path / os.environ["RANK"]
    own.mkdir()
    trainer = new_trainer(kind, path, base, own, tmp_path / "run")
    trainer.train()
    trainer.save_model(str(tmp_path / "straight"))
    optimizer = trainer.optimizer.optimizer
    if path is not None:
        engine = trainer.model_wrapped
        zero8.assert_active(engine)
        optimizer = engine.basic_optimizer
        assert (engine.gradient_clipping(), engine.train_micro_batch_size_per_gpu()) == (1.0, 4)
    again = new_trainer(kind, path, base, own, tmp_path / "again")
    again.add_callback(counter := CountSteps())
    again.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{SAVED_AT}"))
    again.save_model(str(tmp_path / "resumed"))
    torch.distributed.barrier()
    straight, resumed = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("straight", "resumed")
    )
    assert_same(resumed, straight)
    assert counter.steps == list(range(SAVED_AT + 1, STEPS + 1))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.5
    group = optimizer.param_groups[0]
    assert (*group["betas"], group["eps"], group["weight_decay"]) == (0.8, 0.95, 1e-7, 0.1)

    adapters = [p for p in trainer.model.parameters() if p.requires_grad]
    assert sum(getattr(p, "ds_numel", p.numel()) for p in adapters) == TRAINED
    # TRL makes the adapters of a quantized base bfloat16, as QLoRA did.
    is_bfloat16 = (kind, base) == ("sft", "4bit")
    assert {p.dtype for p in adapters} == {torch.bfloat16 if is_bfloat16 else torch.float32}
    rows = optimizer.memory_report().rows
    # The second are narrow: 16 rows to a block.  No matrix of the base is so shaped.
    assert {tuple(row.shape) for row in rows} == {(16, 512), (512, 16)}
    assert {row.bits for row in rows} == {8}
    numel = sum(row.numel for row in rows)
    assert sum(row.state_bytes for row in rows) / numel < 2.1
    assert sum(gathered(numel)) == (TRAINED if config else RANKS * TRAINED)
