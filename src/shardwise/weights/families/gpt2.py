"""GPT-2: `config.json` and published weights of GPT2LMHeadModel.

`transformers` stores the kernels of GPT-2 as (inputs, outputs), like shardwise.
"""

from shardwise.models.gpt import GPT, GPTConfig
from shardwise.text import Json
from shardwise.weights.families.base import (
    Family,
    Shape,
    Shapes,
    TensorLayout,
    TensorSpec,
    check_config,
    count_layers,
    parse_float,
)


def _config_from_hf(config: Json) -> GPTConfig:
    sizes = ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")
    width = config.get("n_embd")
    supported: dict[str, tuple[object, ...]] = {
        "activation_function": ("gelu_new",),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * width if isinstance(width, int) else None),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
        "add_cross_attention": (False,),
    }
    check_config(config, sizes, supported, "GPT")
    return GPTConfig(
        vocab_size=config["vocab_size"],
        max_length=config["n_positions"],
        num_layers=config["n_layer"],
        num_heads=config["n_head"],
        width=config["n_embd"],
    )


def _config_to_hf(config: GPTConfig, vocab_size: int) -> Json:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "vocab_size": vocab_size,
        "n_positions": config.max_length,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.width,
        "n_inner": None,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _config_from_shapes(shapes: Shapes) -> GPTConfig | None:
    stacked = shapes.get("blocks/attn/qkv/kernel")
    # (inputs, 3, heads, size of a head), after the layers of a stack.
    kernel = (
        shapes.get("blocks/0/attn/qkv/kernel", ()) if stacked is None else stacked[1:]
    )
    tokens = shapes.get("tokens", ())
    positions = shapes.get("positions", ())
    if (len(tokens), len(positions), len(kernel)) != (2, 2, 4):
        return None
    if 0 in (*tokens, *positions, *kernel):
        return None
    vocab_size, width = tokens
    _, _, num_heads, head_size = kernel
    if num_heads * head_size != width:
        raise ValueError(
            f"'blocks/0/attn/qkv/kernel' has {num_heads} heads of size {head_size}, "
            f"which does not give the width {width}"
        )
    return GPTConfig(
        vocab_size=vocab_size,
        max_length=positions[0],
        num_layers=count_layers(shapes, stacked),
        num_heads=num_heads,
        width=width,
        scan_layers=stacked is not None,
    )


def _tensors(config: GPTConfig) -> TensorLayout:
    width = config.width
    heads = (config.num_heads, width // config.num_heads)

    def tensor(path: str, published: Shape, shape: Shape | None = None) -> TensorSpec:
        return TensorSpec(path, published, published if shape is None else shape)

    return TensorLayout(
        first={
            "wte.weight": tensor("tokens", (config.vocab_size, width)),
            "wpe.weight": tensor("positions", (config.max_length, width)),
        },
        layers="h",
        block={
            "ln_1.weight": tensor("norm1/scale", (width,)),
            "ln_1.bias": tensor("norm1/bias", (width,)),
            "attn.c_attn.weight": tensor(
                "attn/qkv/kernel", (width, 3 * width), (width, 3, *heads)
            ),
            "attn.c_attn.bias": tensor("attn/qkv/bias", (3 * width,), (3, *heads)),
            "attn.c_proj.weight": tensor(
                "attn/out/kernel", (width, width), (*heads, width)
            ),
            "attn.c_proj.bias": tensor("attn/out/bias", (width,)),
            "ln_2.weight": tensor("norm2/scale", (width,)),
            "ln_2.bias": tensor("norm2/bias", (width,)),
            "mlp.c_fc.weight": tensor("mlp/up/kernel", (width, 4 * width)),
            "mlp.c_fc.bias": tensor("mlp/up/bias", (4 * width,)),
            "mlp.c_proj.weight": tensor("mlp/down/kernel", (4 * width, width)),
            "mlp.c_proj.bias": tensor("mlp/down/bias", (width,)),
        },
        last={
            "ln_f.weight": tensor("norm/scale", (width,)),
            "ln_f.bias": tensor("norm/bias", (width,)),
        },
    )


GPT2 = Family(
    title="GPT-2",
    model_types=("gpt2",),
    config_key="n_embd",
    config_class=GPTConfig,
    model_class=GPT,
    prefix="transformer.",
    embedding="wte.weight",
    marker="wpe.weight",
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
    shape_hint="'tokens' and 'positions' with 2 dims and 'blocks/0/attn/qkv/kernel' with 4",
    compared=("num_heads",),
    described={"dropout": parse_float},
    config_from_hf=_config_from_hf,
    config_to_hf=_config_to_hf,
    config_from_shapes=_config_from_shapes,
    tensors=_tensors,
)
