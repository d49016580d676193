# SPDX-License-Identifier: Apache-2.0
"""Parameter shapes of decoders, from the `config.json` of Hugging Face models."""

from collections.abc import Iterator

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "deepseek_v3")
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
NEEDED_OF_TYPE = {
    "mixtral": ("num_attention_heads", "num_local_experts"),
    "deepseek_v3": (
        *("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
        *("v_head_dim", "n_routed_experts", "n_shared_experts", "moe_intermediate_size"),
        "first_k_dense_replace",
    ),
}
NEEDED_OF_OTHERS = ("num_attention_heads",)


def shapes_of(config: dict) -> Named:
    """Yield name and shape of every parameter of a model.

    Args:
        config: the object in its `config.json`.

    Raises:
        ValueError: if `model_type` is not in `MODEL_TYPES`, or a size is missing or invalid.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"model_type: got {kind!r}, expected one of {list(MODEL_TYPES)}; for other models "
            "write a JSON file of parameter names and shapes, or give --parameters"
        )
    for key in (*NEEDED, *NEEDED_OF_TYPE.get(kind, NEEDED_OF_OTHERS)):
        _check_size(key, config.get(key))
    width, words = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (words, width)
    for number in range(config["num_hidden_layers"]):
        for name, shape in _layer(kind, config, number):
            yield f"model.layers.{number}.{name}", shape
    yield "model.norm.weight", (width,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (words, width)


def _check_size(key: str, value: object) -> None:
    # "first_k_dense_replace" may be 0.
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key} of the model's config: got {value!r}, expected a size")


def _layer(kind: str, config: dict, number: int) -> Named:
    width = config["hidden_size"]
    yield "input_layernorm.weight", (width,)
    attention = _latent_attention(config) if kind == "deepseek_v3" else _attention(kind, config)
    for name, shape in attention:
        yield f"self_attn.{name}", shape
    yield "post_attention_layernorm.weight", (width,)
    if kind == "mixtral":
        yield from _experts("block_sparse_moe", config["num_local_experts"], width, _inner(config))
    elif kind == "deepseek_v3" and number >= config["first_k_dense_replace"]:
        yield from _deepseek_experts(config)
    else:
        yield from _gated("mlp", width, _inner(config))


def _inner(config: dict) -> int:
    return config["intermediate_size"]


def _attention(kind: str, config: dict) -> Named:
    """Attention, possibly with grouped queries."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or width // heads
    rows = {"q": heads * size}
    rows |= dict.fromkeys("kv", (config.get("num_key_value_heads") or heads) * size)
    with_bias = kind == "qwen2" or config.get("attention_bias", False)
    for letter, num_rows in rows.items():
        yield f"{letter}_proj.weight", (num_rows, width)
        if with_bias:
            yield f"{letter}_proj.bias", (num_rows,)
    yield "o_proj.weight", (width, heads * size)
    if config.get("attention_bias", False):
        yield "o_proj.bias", (width,)
    if kind == "qwen3":
        yield "q_norm.weight", (size,)
        yield "k_norm.weight", (size,)


def _latent_attention(config: dict) -> Named:
    """DeepSeek's multi-head latent attention."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    rank = config["kv_lora_rank"]
    plain, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    if config.get("q_lora_rank"):
        yield "q_a_proj.weight", (config["q_lora_rank"], width)
        yield "q_a_layernorm.weight", (config["q_lora_rank"],)
        yield "q_b_proj.weight", (heads * (plain + rotated), config["q_lora_rank"])
    else:
        yield "q_proj.weight", (heads * (plain + rotated), width)
    yield "kv_a_proj_with_mqa.weight", (rank + rotated, width)
    yield "kv_a_layernorm.weight", (rank,)
    yield "kv_b_proj.weight", (heads * (plain + config["v_head_dim"]), rank)
    yield "o_proj.weight", (width, heads * config["v_head_dim"])


def _gated(prefix: str, width: int, inner: int) -> Named:
    yield f"{prefix}.gate_proj.weight", (inner, width)
    yield f"{prefix}.up_proj.weight", (inner, width)
    yield f"{prefix}.down_proj.weight", (width, inner)


def _experts(prefix: str, count: int, width: int, inner: int) -> Named:
    yield f"{prefix}.gate.weight", (count, width)
    for expert in range(count):
        yield from _gated(f"{prefix}.experts.{expert}", width, inner)


def _deepseek_experts(config: dict) -> Named:
    width, inner = config["hidden_size"], config["moe_intermediate_size"]
    yield from _experts("mlp", config["n_routed_experts"], width, inner)
    yield "mlp.gate.e_score_correction_bias", (config["n_routed_experts"],)
    if config["n_shared_experts"]:
        yield from _gated("mlp.shared_experts", width, config["n_shared_experts"] * inner)
