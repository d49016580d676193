# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama with Hugging Face's Trainer and 8-bit optimizer states, and resume.

    pip install transformers accelerate
    python examples/trainer.py

The model is initialized at random and the data is made here: nothing is downloaded.  Start it again
with more --steps and it resumes from its last checkpoint.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from zero8.integrations import hf

VOCABULARY = 256


def main() -> None:
    """Resume if there is a checkpoint, train until --steps steps are done, and save one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="total number")
    parser.add_argument("--out", default="runs/example_trainer", help="folder of checkpoints")
    arguments = parser.parse_args()

    # Row n counts upwards from n.
    tokens = (torch.arange(VOCABULARY)[:, None] + torch.arange(16)) % VOCABULARY
    rows = [{"input_ids": row, "labels": row} for row in tokens]

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, **sizes)
    args = TrainingArguments(
        output_dir=arguments.out,
        max_steps=arguments.steps,
        learning_rate=1e-3,
        logging_steps=10,
        save_steps=10,
        report_to=[],
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        args,
        train_dataset=rows,
        optimizer_cls_and_kwargs=hf.optimizer(args, fp32_params=["*embed*"]),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.out))
    print(trainer.optimizer.optimizer.memory_report())  # Accelerate has wrapped ours


if __name__ == "__main__":
    main()
