# SPDX-License-Identifier: Apache-2.0
"""LoRA on a tiny Llama, for the ranks of test_peft_trl.py: PEFT by hand, Trainer and TRL."""

import os
import warnings
from contextlib import nullcontext
from pathlib import Path

import deepspeed
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from shared_memory import leave_out_shared_memory
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations.deepspeed import (
    is_deepspeed_zero3_enabled,
    unset_hf_deepspeed_config,
)

import zero8
from zero8.integrations import hf

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore", FutureWarning)
leave_out_shared_memory()  # without LOCAL_SIZE it would not be called

VOCABULARY, LENGTH, RANK = 128, 16, 16
# Matrices of LoRA are (16, 512) and, of narrow rows, (512, 16): 8192 elements each.
LLAMA = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": VOCABULARY - 1,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STEPS, SAVED_AT, LR = 6, 3, 1e-2


def lora():
    """Return the adapters; the dropout needs the state of the generators in a checkpoint."""
    return LoraConfig(
        r=RANK,
        lora_alpha=32,
        lora_dropout=0.05,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def new_base(base, folder):
    """Return the base model, the same each time: in "float32", "bfloat16" or bitsandbytes' "4bit".

    Args:
        base: which.
        folder: where a quantized one lies in between.
    """
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    if base != "4bit":
        return model.to(DTYPES[base])
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


def tokens(number):
    """Return some windows of a text that counts."""
    first = torch.arange(number).unsqueeze(1)
    return (first + torch.arange(LENGTH)) % (VOCABULARY - 2)


def logits_of(model):
    """Return the logits of a few windows, without dropout."""
    model.train()  # in eval() bitsandbytes rounds its 4-bit layers' scales to bfloat16
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens(4)).logits.clone()
    model.train()
    return logits


def whole(p):
    """Return a context in which a parameter is whole, under ZeRO-3 too."""
    return deepspeed.zero.GatheredParameters([p]) if hasattr(p, "ds_id") else nullcontext()


def frozen_of(model):
    """Return copies of all parameters and buffers but the adapters, by the base model's names."""
    copies = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "lora_" not in name:
            with whole(tensor):
                name = name.removeprefix("base_model.model.").replace("base_layer.", "")
                copies[name] = tensor.detach().clone()
                if hasattr(tensor, "quant_state"):
                    copies[f"{name} scales"] = tensor.quant_state.absmax.clone()
    return copies


def same(one, other):
    """Return whether two dictionaries hold the same bits under the same names."""
    return one.keys() == other.keys() and all(
        t.dtype == other[name].dtype and torch.equal(t, other[name]) for name, t in one.items()
    )


def moments_of(optimizer):
    """Return what `memory_report` says, for the test to judge."""
    rows = optimizer.memory_report().to_dicts()
    return {
        "bits": {row["bits"] for row in rows},
        "shapes": {tuple(row["shape"]) for row in rows},
        "numel": sum(row["numel"] for row in rows),
        "bytes": sum(row["state_bytes"] for row in rows),
    }


def carried_over(base, folder, adapter, dtype, trained_logits):
    """Return what becomes of a saved adapter in a fresh base model, beside it and merged."""
    loaded = PeftModel.from_pretrained(new_base(base, folder / "base"), adapter)
    for name, p in loaded.named_parameters():  # PEFT has made bfloat16 ones float32
        p.data = p.data.to(dtype) if "lora_" in name else p.data
    beside = logits_of(loaded)
    result = {
        "loads": torch.equal(beside, trained_logits),
        "matters": (beside - logits_of(new_base(base, folder / "base"))).abs().max().item(),
        "largest": beside.abs().max().item(),
    }
    if base == "float32":
        loaded.double()
        beside, merged = logits_of(loaded), loaded.merge_and_unload()
        result["merge error"] = (logits_of(merged) - beside).abs().max().item()
        result["left"] = [name for name, _ in merged.named_parameters() if "lora_" in name]
    return result


# --- By hand --------------------------------------------------------------------------------------


def by_hand(folder, base):
    """Train adapters in plain PyTorch, stop, resume; save and merge."""
    folder = Path(folder) / os.environ["RANK"]
    folder.mkdir()

    def begun():
        model = get_peft_model(new_base(base, folder / "base"), lora())
        model.train()  # from_pretrained leaves it in eval()
        return model, zero8.Adam8bitBlockwise(model.named_parameters(), lr=LR)

    def train(model, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)  # of the dropout
            batch = tokens(4) + step
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    def adapters(model):
        return {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}

    losses = []
    model, optimizer = begun()
    before = frozen_of(model)
    train(model, optimizer, range(SAVED_AT))
    torch.save((adapters(model), optimizer.state_dict()), folder / "stopped.pt")
    train(model, optimizer, range(SAVED_AT, STEPS))
    straight = adapters(model)

    def resumed(with_states):
        model, optimizer = begun()
        weights, states = torch.load(folder / "stopped.pt", weights_only=True)
        model.load_state_dict(weights, strict=False)
        if with_states:
            optimizer.load_state_dict(states)
        train(model, optimizer, range(SAVED_AT, STEPS))
        return same(adapters(model), straight)

    model.save_pretrained(folder / "adapter")
    logits = logits_of(model)
    return {
        "losses": losses[:STEPS],
        "moments": moments_of(optimizer),
        "trained": sum(p.numel() for p in straight.values()),
        "dtypes": {str(p.dtype) for p in straight.values()},
        "frozen dtypes": {str(p.dtype) for p in before.values()},
        "frozen": same(frozen_of(model), before),
        "resumes": resumed(with_states=True),
        "resumes without states": resumed(with_states=False),
        "carried": carried_over(base, folder, folder / "adapter", torch.float32, logits),
    }


# --- Trainer and SFTTrainer -----------------------------------------------------------------------


def tokenizer():
    """Return a tokenizer of the words w0, w1 and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(VOCABULARY - 2)}
    words |= {"<unk>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )


class CountSteps(TrainerCallback):
    """Notes the steps that a Trainer really takes."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, **_):
        self.steps.append(state.global_step)


def new_trainer(kind, ds_config, base, folder, output):
    """Return transformers' Trainer, or TRL's SFTTrainer, of adapters on a fresh base model.

    Args:
        kind: "trainer" or "sft".
        ds_config: path of a DeepSpeed config; None for DistributedDataParallel.
        base: as for `new_base`.
        folder: to work in.
        output: of the trainer.
    """
    options = {
        "output_dir": str(output),
        "deepspeed": ds_config,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": SAVED_AT,
        "per_device_train_batch_size": 4,
        "learning_rate": LR,
        "weight_decay": 0.01,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
    }
    if ds_config is None:
        # What the Trainer before has left: TRL and Accelerate ask for it.
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        unset_hf_deepspeed_config()
    AcceleratorState._reset_state(True)
    windows = tokens(96)
    if kind == "trainer":
        arguments = TrainingArguments(**options)
        own = own_optimizer(arguments)
        torch.manual_seed(11)
        model = get_peft_model(new_base(base, folder / "base"), lora())
        data = [{"input_ids": window, "labels": window} for window in windows]
        return Trainer(model=model, args=arguments, train_dataset=data, **own)
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [{"text": " ".join(f"w{token}" for token in window)} for window in windows.tolist()]
    arguments = SFTConfig(max_length=2 * LENGTH, **options)
    return SFTTrainer(
        model=new_base(base, folder / "base"),
        args=arguments,
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer(),
        peft_config=lora(),
        **own_optimizer(arguments),
    )


def own_optimizer(arguments: TrainingArguments) -> dict:
    """Return what gives a Trainer our optimizer where no DeepSpeed config does."""
    if arguments.deepspeed is not None:
        return {}
    return {"optimizer_cls_and_kwargs": hf.optimizer(arguments)}


def by_trainer(folder, kind, ds_config, base):
    """Train adapters with a Trainer that saves, and once more from the checkpoint in the middle."""
    folder = Path(folder)
    saved, own = folder / "adapter", folder / os.environ["RANK"]
    own.mkdir()
    trainer = new_trainer(kind, ds_config, base, own, folder / "run")
    trainer.train()
    trainer.save_model(str(saved))
    optimizer = trainer.optimizer.optimizer
    if ds_config is not None:
        zero8.assert_active(trainer.model_wrapped)
        optimizer = trainer.model_wrapped.basic_optimizer
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    before = frozen_of(new_base(base, own / "base"))
    after = frozen_of(trainer.model)
    logits = logits_of(trainer.model_wrapped)
    result = {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "moments": moments_of(optimizer),
        "trained": sum(getattr(p, "ds_numel", p.numel()) for p in trained),
        "dtypes": {str(p.dtype) for p in trained},
        "frozen dtypes": {str(p.dtype) for p in before.values()},
        "frozen": same(after, before),
        "carried": carried_over(base, own, saved, trained[0].dtype, logits),
    }
    again = new_trainer(kind, ds_config, base, own, folder / "again")
    again.add_callback(counter := CountSteps())
    again.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{SAVED_AT}"))
    again.save_model(str(folder / "resumed"))
    torch.distributed.barrier()

    def adapters(name):
        return load_file(folder / name / "adapter_model.safetensors")

    straight = adapters("adapter")
    result["resumes"] = same(adapters("resumed"), straight)
    result["resumed steps"] = counter.steps
    return result
