# SPDX-License-Identifier: Apache-2.0
"""`zero8 plan --model` of a config.json, whose shapes are those of transformers' model."""

import json
import shlex

import pytest
from doc_blocks import is_shown

from zero8 import cli
from zero8.plan.model import Model

pytestmark = pytest.mark.integrations

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN3_8B = LLAMA_8B | {
    "model_type": "qwen3",
    "head_dim": 128,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
}


@pytest.fixture
def model_of(tmp_path, monkeypatch):
    """Return a function: the model of the config.json in the working directory."""
    monkeypatch.chdir(tmp_path)

    def model_of(config):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return Model.of_file(path)

    return model_of


# The totals are those of the published weights.
@pytest.mark.parametrize(
    ("config", "numel"),
    [
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_8B | {"tie_word_embeddings": True}, 8_030_261_248 - 128256 * 4096),
        (QWEN3_8B, 8_190_735_360),
    ],
    ids=["Llama-3.1-8B", "tied", "Qwen3-8B"],
)
def test_plan_of_a_published_model_has_its_number_of_parameters(model_of, config, numel):
    assert model_of(config).numel == numel


@pytest.mark.shown("docs/moving.md", "$ zero8 plan")
def test_plan_of_a_config_in_a_page_is_what_the_command_prints(model_of, block, capsys):
    model_of(LLAMA_8B)  # which the page describes
    ((command, shown),) = block.session
    assert cli.main(shlex.split(command)[1:]) == 0
    assert is_shown(shown, printed := capsys.readouterr().out), printed
