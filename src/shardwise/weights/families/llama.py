"""Llama 2 and 3, and Mixtral: `config.json` and published weights of LlamaForCausalLM and
MixtralForCausalLM.

`transformers` stores kernels as (outputs, inputs), shardwise as (inputs, outputs). Mixtral is a
Llama with experts. Its experts are published one by one, and stacked here.
"""

import math
from collections.abc import Callable
from dataclasses import fields, replace

from shardwise.models.llama import Llama, LlamaConfig, RopeScaling
from shardwise.text import Json
from shardwise.weights.families.base import (
    HEAD,
    Family,
    Shape,
    Shapes,
    TensorLayout,
    TensorSpec,
    check_config,
    count_layers,
    parse_float,
    parse_int,
)

# Values of `model_type` in `config.json`.
LLAMA_TYPE, MIXTRAL = "llama", "mixtral"
PARAM_DTYPES = ("float32", "bfloat16", "float16")


def _config_from_hf(config: Json) -> LlamaConfig:
    sizes: tuple[str, ...] = (
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_size",
        "intermediate_size",
    )
    width = config.get("hidden_size")
    heads = config.get("num_attention_heads")
    head_size = None
    if isinstance(width, int) and isinstance(heads, int) and heads:
        head_size = width // heads
    supported: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "head_dim": (None, head_size),
        "pretraining_tp": (1,),
        "quantization_config": (None,),
    }
    theta, scaling, problems = _rope_from_hf(config)
    has_experts = config.get("model_type") == MIXTRAL
    if has_experts:
        sizes += ("num_local_experts", "num_experts_per_tok")
        supported["sliding_window"] = (None,)
    check_config(config, sizes, supported, "Llama", problems)
    return LlamaConfig(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        width=config["hidden_size"],
        mlp_width=config["intermediate_size"],
        max_length=int(config.get("max_position_embeddings", 2048)),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        param_dtype="float32",
        rope_theta=theta,
        rope_scaling=scaling,
        num_experts=config["num_local_experts"] if has_experts else 0,
        top_k=config["num_experts_per_tok"] if has_experts else 0,
    )


def _rope_from_hf(config: Json) -> tuple[float, RopeScaling | None, list[str]]:
    """Return the rotary embedding of a `config.json`: theta, scaling, and problems.

    Newer versions of `transformers` describe it in one dictionary, older ones in two places.
    """
    rope: Json = config.get("rope_parameters") or config.get("rope_scaling") or {}
    default = 1e6 if config.get("model_type") == MIXTRAL else 1e4
    theta = float({"rope_theta": default, **config, **rope}["rope_theta"])
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    problems: list[str] = []
    if kind == "llama3":
        scaling, problems = _llama3_scaling(rope)
    elif kind != "default":
        problems = [
            f"rope scaling is {kind!r}; only 'default' or 'llama3' is implemented"
        ]
    rotated = rope.get("partial_rotary_factor", 1.0)
    if not problems and rotated != 1.0:
        problems = [f"partial_rotary_factor is {rotated}; only 1.0 is implemented"]
    return theta, scaling, problems


def _llama3_scaling(rope: Json) -> tuple[RopeScaling | None, list[str]]:
    keys = (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    )
    missing = [key for key in keys if not isinstance(rope.get(key), int | float)]
    if missing:
        return None, [f"rope scaling 'llama3' has no {key}" for key in missing]
    factor, low, high, length = (rope[key] for key in keys)
    if not 0 < low < high or factor <= 0:
        return None, [
            f"rope scaling 'llama3' has factor {factor}, low_freq_factor {low} and "
            f"high_freq_factor {high}; all must be positive and low must be less than high"
        ]
    return RopeScaling(float(factor), float(low), float(high), int(length)), []


def _config_to_hf(config: LlamaConfig, vocab_size: int) -> Json:
    rope = config.rope_scaling
    scaling = None
    if rope is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low,
            "high_freq_factor": rope.high,
            "original_max_position_embeddings": rope.original_length,
        }
    names: Json = {"architectures": ["LlamaForCausalLM"], "model_type": LLAMA_TYPE}
    if config.num_experts:
        names = {
            "architectures": ["MixtralForCausalLM"],
            "model_type": MIXTRAL,
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.top_k,
            "sliding_window": None,
        }
    return {
        **names,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "vocab_size": vocab_size,
        "max_position_embeddings": config.max_length,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.width // config.num_heads,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied,
        "torch_dtype": config.param_dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _config_from_shapes(shapes: Shapes) -> LlamaConfig | None:
    stacked = shapes.get("blocks/query")
    prefix = "blocks/0/" if stacked is None else "blocks/"
    # A stacked parameter has the layers before its own dims.
    start = 0 if stacked is None else 1
    query = shapes.get(f"{prefix}query", ())[start:]
    key = shapes.get(f"{prefix}key", ())[start:]
    # The kernel of an expert has the dim of all experts before its own.
    experts = shapes.get(f"{prefix}moe/gate", ())[start : start + 1]
    gate = shapes.get(f"{prefix}gate", ())[start:]
    if experts:
        gate = shapes[f"{prefix}moe/gate"][start + 1 :]
    tokens = shapes.get("tokens", ())
    if (len(tokens), len(query), len(key), len(gate)) != (2, 3, 3, 2):
        return None
    if 0 in (*tokens, *query, *key, *gate):
        return None
    vocab_size, width = tokens
    _, num_heads, head_size = query
    _, num_kv_heads, kv_head_size = key
    if (
        num_heads * head_size != width
        or kv_head_size != head_size
        or num_heads % num_kv_heads
    ):
        raise ValueError(
            f"'{prefix}query' has shape {query} and '{prefix}key' {key}, "
            f"which are not heads of a model of width {width}"
        )
    return LlamaConfig(
        vocab_size=vocab_size,
        num_layers=count_layers(shapes, stacked),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        width=width,
        mlp_width=gate[1],
        tied="head" not in shapes,
        num_experts=experts[0] if experts else 0,
        # Shapes do not reveal it, see `described`.
        top_k=min(2, experts[0]) if experts else 0,
        scan_layers=stacked is not None,
    )


def _parse_rope_scaling(value: object) -> RopeScaling | None:
    if not isinstance(value, dict) or set(value) != {
        field.name for field in fields(RopeScaling)
    }:
        return None
    if all(isinstance(number, int | float) and number > 0 for number in value.values()):
        return RopeScaling(**value)
    return None


def _parse_dtype(value: object) -> str | None:
    return value if isinstance(value, str) and value in PARAM_DTYPES else None


def _tensors(config: LlamaConfig) -> TensorLayout:
    width = config.width
    head_size = width // config.num_heads

    def scale(path: str) -> TensorSpec:
        return TensorSpec(path, (width,), (width,))

    def kernel(path: str, inputs: Shape, outputs: Shape) -> TensorSpec:
        published = (math.prod(outputs), math.prod(inputs))
        return TensorSpec(path, published, (*inputs, *outputs), transposed=True)

    embedding = (config.vocab_size, width)
    last = {"norm.weight": scale("norm/scale")}
    if not config.tied:
        last[HEAD] = kernel("head", (width,), (config.vocab_size,))
    return TensorLayout(
        first={"embed_tokens.weight": TensorSpec("tokens", embedding, embedding)},
        layers="layers",
        block={
            "self_attn.q_proj.weight": kernel(
                "query", (width,), (config.num_heads, head_size)
            ),
            "self_attn.k_proj.weight": kernel(
                "key", (width,), (config.num_kv_heads, head_size)
            ),
            "self_attn.v_proj.weight": kernel(
                "value", (width,), (config.num_kv_heads, head_size)
            ),
            "self_attn.o_proj.weight": kernel(
                "out", (config.num_heads, head_size), (width,)
            ),
            **_mlp_tensors(config, kernel),
            "input_layernorm.weight": scale("norm1/scale"),
            "post_attention_layernorm.weight": scale("norm2/scale"),
        },
        last=last,
    )


def _mlp_tensors(
    config: LlamaConfig, kernel: Callable[[str, Shape, Shape], TensorSpec]
) -> dict[str, TensorSpec]:
    """Return the tensors of the MLP, or of the experts, of one block.

    Args:
        config: the configuration of the model.
        kernel: returns the tensor for a path, the inputs and the outputs of a kernel.
    """
    width, hidden = (config.width,), (config.mlp_width,)
    gate, up, down = (
        kernel(name, *shape)
        for name, shape in (
            ("gate", (width, hidden)),
            ("up", (width, hidden)),
            ("down", (hidden, width)),
        )
    )
    if not config.num_experts:
        return {
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": down,
        }
    router = kernel("moe/router", width, (config.num_experts,))
    tensors = {"block_sparse_moe.gate.weight": router}
    for number in range(config.num_experts):
        for name, spec in (("w1", gate), ("w2", down), ("w3", up)):
            tensors[f"block_sparse_moe.experts.{number}.{name}.weight"] = replace(
                spec,
                path=f"moe/{spec.path}",
                index=(number,),
                sizes=(config.num_experts,),
            )
    return tensors


LLAMA = Family(
    title="Llama",
    model_types=(LLAMA_TYPE, MIXTRAL),
    config_key="num_key_value_heads",
    config_class=LlamaConfig,
    model_class=Llama,
    prefix="model.",
    embedding="embed_tokens.weight",
    marker="layers.0.self_attn.q_proj.weight",
    buffers=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    shape_hint=(
        "'tokens' with 2 dims, 'blocks/0/query' and 'key' with 3, and 'gate' with 2 or "
        "'moe/gate' with 3"
    ),
    compared=(
        "num_heads",
        "num_kv_heads",
        "rope_theta",
        "rope_scaling",
        "norm_epsilon",
        "tied",
        "num_experts",
        "top_k",
    ),
    described={
        "rope_theta": parse_float,
        "rope_scaling": _parse_rope_scaling,
        "norm_epsilon": parse_float,
        "param_dtype": _parse_dtype,
        "max_length": parse_int,
        "top_k": parse_int,
    },
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    config_from_shapes=_config_from_shapes,
    tensors=_tensors,
)
