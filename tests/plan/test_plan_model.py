# SPDX-License-Identifier: Apache-2.0
"""Models of a size alone, of a config.json and of a list of shapes."""

import json

import pytest
from model_configs import LLAMA_8B

from zero8.plan.model import Model

MIXTRAL = LLAMA_8B | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8}
QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def model_of(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    return Model.of_file(path)


# The totals are those of the published weights.
@pytest.mark.parametrize(
    ("config", "numel"),
    [
        pytest.param(LLAMA_8B, 8_030_261_248, id="Llama-3.1-8B"),
        pytest.param(MIXTRAL, 46_702_792_704, id="Mixtral-8x7B"),
        pytest.param(QWEN2_7B, 7_615_616_512, id="Qwen2.5-7B"),
        pytest.param(QWEN3_8B, 8_190_735_360, id="Qwen3-8B"),
        pytest.param(DEEPSEEK_V3, 671_026_419_200, id="DeepSeek-V3"),
    ],
)
def test_config_of_a_published_model_has_its_number_of_parameters(tmp_path, config, numel):
    assert model_of(tmp_path, config).numel == numel


def test_config_with_tied_embeddings_has_them_once(tmp_path):
    tied = model_of(tmp_path, LLAMA_8B | {"tie_word_embeddings": True})
    assert tied.numel == 8_030_261_248 - 128256 * 4096


def test_config_without_a_low_rank_of_queries_has_one_matrix_for_them(tmp_path):
    names = dict(model_of(tmp_path, DEEPSEEK_V3 | {"q_lora_rank": None}).params)
    assert names["model.layers.0.self_attn.q_proj.weight"] == (128 * 192, 7168)


def test_config_with_biases_of_attention_has_them(tmp_path):
    names = dict(model_of(tmp_path, LLAMA_8B | {"attention_bias": True}).params)
    assert names["model.layers.0.self_attn.o_proj.bias"] == (4096,)
    assert names["model.layers.0.self_attn.k_proj.bias"] == (1024,)


def test_shapes_are_taken_as_they_are(tmp_path):
    model = model_of(tmp_path, {"a": [20, 300], "b": [7]})
    assert model.params == (("a", (20, 300)), ("b", (7,)))
    assert (model.numel, model.largest_numel) == (6007, 6000)


@pytest.mark.parametrize(("text", "numel"), [("8B", 8e9), ("350m", 350e6), ("1.5T", 1.5e12)])
def test_size_has_as_many_parameters_up_to_a_row(text, numel):
    model = Model.of_size(text)
    assert numel - 4096 < model.numel <= numel
    assert model.largest_numel == 4096 * 4096


@pytest.mark.parametrize("text", ["", "8 billions", "-3B", "100"])
def test_size_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="expected a size such as 350M, 8B"):
        Model.of_size(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param({"model_type": "gpt2"}, "got 'gpt2', expected one of", id="other type"),
        pytest.param({"hidden_size": 8}, "model_type: got None", id="no type"),
        pytest.param(LLAMA_8B | {"vocab_size": "many"}, "vocab_size", id="no size"),
        pytest.param(LLAMA_8B | {"hidden_size": True}, "hidden_size", id="a bool"),
        pytest.param(LLAMA_8B | {"num_hidden_layers": -1}, "got -1", id="negative"),
        pytest.param(MIXTRAL | {"num_local_experts": None}, "num_local_experts", id="experts"),
        pytest.param(DEEPSEEK_V3 | {"kv_lora_rank": None}, "kv_lora_rank", id="latent"),
        pytest.param({"a": [3, -1]}, "model_type", id="negative shape"),
        pytest.param([1], "a JSON object that is not empty", id="list"),
        pytest.param({}, "a JSON object that is not empty", id="empty"),
    ],
)
def test_file_that_is_not_understood_is_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        model_of(tmp_path, content)


def test_file_without_json_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        Model.of_file(path)
