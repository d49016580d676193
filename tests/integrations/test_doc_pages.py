# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/ that need others' trainers, run as the pages show them.

Each script is made of what the page says that the reader has, of blocks, and of what the page
promises.
"""

import json
import re
import shutil

import pytest
from doc_blocks import block_with, reader, run_script, type_in
from places import ROOT, TESTS
from ranks import build_ops, free_port

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]

BEGIN = f"import sys; sys.path.insert(0, {str(TESTS / 'support')!r})\nfrom doc_model import *\n"
OFFLINE = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
SFT = """
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

save_base("base")
model = LlamaForCausalLM.from_pretrained("base")
lora = LoraConfig(r=16, target_modules="all-linear")
data = Dataset.from_list([{"text": " ".join(f"w{n + k}" for k in range(16))} for n in range(32)])
SFTConfig = on_the_cpu(SFTConfig)
"""
BYTES = re.compile(r"\b\d+ bytes")
"""Of files, in which names and versions are."""

ADAPTERS = """
rows = optimizer.memory_report().rows
assert len(rows) == 28 and all("lora_" in row.name and row.bits == 8 for row in rows), rows
"""


@pytest.fixture(scope="module", autouse=True)
def ops():
    """Build the ops here: the time limits are for the scripts."""
    build_ops()


@pytest.fixture
def script(tmp_path):
    """Return a function that runs a script of parts in a reader's folder; it returns the output."""
    folder = reader(tmp_path)

    def run(*parts, launched=False, **env):
        """Run it; `launched` gives it the variables that a launcher gives to an only rank."""
        if launched:
            env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return run_script(folder, *parts, **OFFLINE | env)

    return run


# --- docs/moving.md ------------------------------------------------------------------------------

TRAINER = """
def new_trainer(config, max_steps):
    args = TrainingArguments(
        output_dir="out", deepspeed=config, bf16=True, max_steps=max_steps, save_steps=20,
        per_device_train_batch_size=4,
    )
    return Trainer(model=new_model(), args=args, train_dataset=data)
"""


@pytest.mark.shown(
    "docs/moving.md",
    "class Check",
    "RuntimeError",
    "1,441,792",
    "resume_from_checkpoint",
    "$ zero8 checkpoint convert out/checkpoint-40 out",
    "$ zero8 checkpoint convert out/checkpoint-40 fp32",
)
def test_page_on_adamw_is_what_happens(blocks, script, tmp_path):
    """A run of AdamW is checked, resumed in 8 bits, and carried elsewhere."""
    check, error, report, resume, universal, convert = blocks
    config = json.loads((ROOT / "configs" / "hf" / "zero3_offload.json").read_text())
    config["optimizer"]["type"] = "AdamW"
    (tmp_path / "old.json").write_text(json.dumps(config))
    script(BEGIN, TRAINER, "new_trainer('old.json', 20).train()", launched=True)

    printed = script(
        *(BEGIN, TRAINER, "trainer = new_trainer('old.json', 1)", check.text),
        "try:\n    trainer.train()",
        "except RuntimeError as error:\n    print('RuntimeError:', error)",
        launched=True,
    )
    assert " ".join(error.text.split()) in printed

    printed = script(
        *(BEGIN, TRAINER, "trainer = new_trainer('configs/hf/zero3_offload.json', 40)"),
        *(check.text, resume.text),
        "print([row['step'] for row in trainer.state.log_history])",
        "print(trainer.model_wrapped.optimizer.optimizer.memory_report())",
        launched=True,
    )
    assert printed.endswith(report.text)
    for block in (universal, convert):
        ((command, shown),) = block.session
        assert BYTES.sub("#", type_in(tmp_path, command)) == BYTES.sub("#", shown)


# --- docs/integrations.md -------------------------------------------------------------------------

REPORT = "print({}.memory_report())"
MATRICES = "8-bit: 1,441,792 elements"
# Of each phrase's block what comes before it and after it, and what is printed.
SCRIPTS = {
    "bf16=True": (
        [
            BEGIN,
            "class Trainer(Trainer):\n    def train(self):\n        super().train()\n"
            "        print(self.model_wrapped.optimizer.optimizer.memory_report())",
            "model = new_model()",
        ],
        [],
        MATRICES,
    ),
    "accelerator.prepare": (
        [
            BEGIN,
            "from accelerate import Accelerator",
            "model, accelerator = new_model(), Accelerator(cpu=True)",
        ],
        [
            "batch = data[0]['input_ids'][None]",
            "accelerator.backward(model(input_ids=batch, labels=batch).loss)",
            "optimizer.step()",
            "accelerator.save_state('state')",
            "accelerator.load_state('state')",
            REPORT.format("optimizer.optimizer"),
        ],
        MATRICES,
    ),
    "hf.optimizer(args),": (
        [
            *(BEGIN, SFT, "from zero8.integrations import hf"),
            "args = SFTConfig(output_dir='out', max_steps=2)",
        ],
        ["trainer.train()", "optimizer = trainer.optimizer.optimizer", ADAPTERS],
        "",
    ),
    "get_peft_model": (
        [BEGIN, SFT, "import zero8", "from peft import get_peft_model", "model = new_model()"],
        [
            "batch = torch.arange(16)[None]",
            "model(input_ids=batch, labels=batch).loss.backward()",
            "optimizer.step()",
            ADAPTERS,
        ],
        "",
    ),
    "SFTConfig": (
        [BEGIN, SFT],
        ["trainer.train()", "optimizer = trainer.model_wrapped.optimizer.optimizer", ADAPTERS],
        "",
    ),
    "Adam8bitContainer.Config": (
        ["import torch"],
        [
            "model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))",
            'optimizers = adam8bit(codec="dynamic").build(model_parts=[model])',
            "model(torch.ones(8, 256)).square().mean().backward()",
            "optimizers.step()",
            "(optimizer,) = optimizers",
            "assert optimizer.settings.codec.name == 'dynamic'",
            "assert optimizer.param_groups[0]['betas'] == (0.9, 0.95)",
            REPORT.format("optimizer"),
        ],
        "8-bit: 131,072 elements",
    ),
}


@pytest.mark.parametrize("phrase", SCRIPTS)
def test_block_of_the_page_runs_in_a_script(phrase, script):
    before, after, expected = SCRIPTS[phrase]
    block = block_with("docs/integrations.md", phrase)
    launched = phrase in ("bf16=True", "SFTConfig")
    assert expected in script(*before, block.text, *after, launched=launched)


@pytest.mark.shown("docs/integrations.md", "hf.optimizer(args, fp32_params", "hf.Monitor")
@pytest.mark.shown("docs/moving.md", "optimizer.pt back/")
def test_trainer_blocks_without_deepspeed_train(blocks, script, tmp_path):
    """With the health of the optimizer; its checkpoint leads back to AdamW."""
    factory, monitor, convert = blocks
    begin = (BEGIN, "model = new_model()")
    arguments = "args = TrainingArguments(output_dir='out', max_steps={}, save_steps=10)"
    printed = script(
        *(*begin, arguments.format(50), factory.text, monitor.text, "trainer.train()"),
        "print(trainer.state.log_history)",
        "print(trainer.optimizer.optimizer.memory_report())",
    )
    assert "'zero8/share_8bit'" in printed
    assert re.search(r"^model\.embed_tokens\.weight +32 ", printed, re.MULTILINE)
    ((command, shown),) = convert.session
    assert BYTES.sub("#", type_in(tmp_path, command)) == BYTES.sub("#", shown)
    for path in (tmp_path / "out" / "checkpoint-10").iterdir():
        if path.name != "optimizer.pt":
            shutil.copy(path, tmp_path / "back")
    printed = script(
        *(*begin, arguments.format(12)),
        "trainer = Trainer(model=model, args=args, train_dataset=data)",
        'trainer.train(resume_from_checkpoint="back")',
        "steps = {int(state['step']) for state in trainer.optimizer.state.values()}",
        "print(type(trainer.optimizer.optimizer).__name__, steps)",
    )
    assert printed.endswith("AdamW {12}\n")


@pytest.mark.shown("docs/integrations.md", "trainer.save_checkpoint", "ModelParallelStrategy(")
def test_lightning_blocks_train_alone_and_under_fsdp2(blocks, script, tmp_path):
    alone, sharded = blocks
    printed = script(
        alone.text,
        sharded.text,
        "trainer.fit(Sharded(), torch.utils.data.DataLoader(torch.randn(64, 256), batch_size=8))",
        "optimizer = trainer.lightning_module.optimizers(use_pl_optimizer=False)",
        "if trainer.global_rank == 0:\n    print(trainer.global_step, optimizer.memory_report())",
    )
    # 64 rows in batches of 8, of which each of two ranks takes half, twice.
    assert "\n8 parameter " in printed
    assert "8-bit: 65,536 elements" in printed  # half of both matrices
    assert (tmp_path / "model.ckpt").is_file()


@pytest.mark.shown("docs/integrations.md", "monitor(engine")
def test_deepspeed_monitor_block_writes_the_health(block, script, tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam8bitBlockwise", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
    }
    script(
        "import deepspeed, torch",
        'deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False',
        "model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))",
        f"config = {config!r}",
        block.text,
        "for _ in range(100):\n"
        "    engine.backward(engine(torch.ones(2, 64)).square().mean())\n"
        "    engine.step()",
        launched=True,
    )
    (path,) = tmp_path.glob("job/*share_8bit*.csv")
    assert len(path.read_text().splitlines()) == 2  # a header, and step 50


# --- docs/low-bit-training.md ---------------------------------------------------------------------

LOSSES = """
losses = []
for _ in range(5):
    loss = model(torch.ones(16, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""


@pytest.mark.shown("docs/low-bit-training.md", "quantize_(model, int8_weight_only", "1.015625")
def test_int8_weights_block_prints_what_the_page_shows(blocks, script):
    code, shown = blocks
    assert script(code.text) == shown.text


@pytest.mark.shown(
    "docs/low-bit-training.md",
    "quantize_(model, int8_mixed",
    "Float8LinearConfig(",
    "add_safe_globals",
)
def test_low_bit_blocks_step_and_are_saved_and_loaded(blocks, script):
    """The block that loads goes back to where it has saved."""
    *kinds, load = blocks
    save, load = load.text.split("\n\n", 2)[1:]
    imports = "from torchao.prototype import quantized_training"
    for kind in kinds:
        begin = (kind.text, "optimizer.zero_grad()", imports, save)
        steps = (LOSSES, "expected = losses", load, LOSSES, "print(losses == expected)")
        assert script(*begin, *steps) == "True\n"


@pytest.mark.shown("docs/low-bit-training.md", "quantize_(model, bitnet", "def tensors(model)")
def test_bitnet_block_trains_on_two_ranks_and_is_saved_and_loaded(blocks, tmp_path, script):
    """Other weights, before the load, are those of the checkpoint after it."""
    train, checkpoint = blocks
    saving, loading = checkpoint.text.rsplit("\n\n", 1)
    weight = "model[0].weight.detach().to_local()._data"
    parts = (
        *(train.text, saving, f"before = {weight}.clone()"),
        f"{weight}.zero_()",
        *(loading, f"equal = torch.equal(before, {weight})"),
        "precompute_bitnet_scale_for_fsdp(model)",
        # A file each: what two ranks print at once can be mixed.
        'out = open(f"rank{torch.distributed.get_rank()}", "w")',
        "print(equal, (before != 0).any().item(), file=out, flush=True)",
        "torch.distributed.destroy_process_group()",
    )
    (tmp_path / "bitnet.py").write_text("\n".join(parts))
    type_in(tmp_path, "torchrun --standalone --nproc-per-node 2 bitnet.py")
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["True True\n"] * 2
