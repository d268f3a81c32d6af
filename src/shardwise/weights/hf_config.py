"""What a published GPT-2 or Llama is: `config.json` of `transformers` in and out, and what can be told from shapes alone."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from shardwise.models.gpt import GPT, GPTConfig
from shardwise.models.llama import Llama, LlamaConfig, RopeScaling

Shape = tuple[int, ...]
Config = GPTConfig | LlamaConfig
NAME = {GPTConfig: "GPT", LlamaConfig: "Llama"}


def model_of(config: Config, rngs: Any) -> GPT | Llama:
    return GPT(config, rngs) if isinstance(config, GPTConfig) else Llama(config, rngs)


def config_from_hf(config: Mapping[str, Any]) -> Config:
    """Our configuration from the dictionary in `config.json`; ValueError with all that these models do not compute.

    The vocabulary is the published one, not rounded up, and dropout is off: it belongs to a run, not to the weights.
    """
    kind = config.get("model_type", "llama" if "num_key_value_heads" in config else "gpt2")
    if kind == "gpt2":
        return _gpt_from_hf(config)
    if kind == "llama":
        return _llama_from_hf(config)
    raise ValueError(
        f"this config.json is of a model of type {kind!r}; gpt2 and llama are implemented"
    )


def _gpt_from_hf(config: Mapping[str, Any]) -> GPTConfig:
    names = ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")
    supported: dict[
        str, tuple[Any, ...]
    ] = {  # the first value is what transformers takes for an absent key
        "activation_function": ("gelu_new",),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * config["n_embd"] if isinstance(config.get("n_embd"), int) else None),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
        "add_cross_attention": (False,),
    }
    _check(config, names, supported, "GPT")
    vocab_size, max_length, num_layers, num_heads, width = (config[name] for name in names)
    return GPTConfig(
        vocab_size=vocab_size,
        max_length=max_length,
        num_layers=num_layers,
        num_heads=num_heads,
        width=width,
    )


def _llama_from_hf(config: Mapping[str, Any]) -> LlamaConfig:
    names = (
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_size",
        "intermediate_size",
    )
    width, heads = (config.get(name) for name in ("hidden_size", "num_attention_heads"))
    supported: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "head_dim": (
            None,
            width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None,
        ),
        "pretraining_tp": (1,),
        "quantization_config": (None,),
    }
    rope, problems = _rope_from_hf(config)
    _check(config, names, supported, "Llama", problems)
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
        **rope,
    )


def _rope_from_hf(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Rotations, which newer versions describe in one dictionary and older ones in two places."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    theta = given.get("rope_theta", config.get("rope_theta", 1e4))
    rope: dict[str, Any] = {"rope_theta": float(theta), "rope_scaling": None}
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if missing := [
            f"rope scaling 'llama3' has no {key}"
            for key in keys
            if not isinstance(given.get(key), int | float)
        ]:
            return rope, missing
        factor, low, high, length = (given[key] for key in keys)
        if not 0 < low < high or factor <= 0:
            return rope, [
                f"rope scaling 'llama3' has factors {factor}, {low} and {high}; the last two must rise from above 0"
            ]
        rope["rope_scaling"] = RopeScaling(float(factor), float(low), float(high), int(length))
    elif kind != "default":
        return rope, [f"rope scaling is {kind!r}; only 'default' or 'llama3' is implemented"]
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        return rope, [
            f"partial_rotary_factor is {given['partial_rotary_factor']}; only 1.0 is implemented"
        ]
    return rope, []


def _check(
    config: Mapping[str, Any],
    names: Iterable[str],
    supported: Mapping[str, tuple[Any, ...]],
    model: str,
    others: Iterable[str] = (),
) -> None:
    problems = []
    for name in names:
        value = config.get(name)
        if value is None:
            problems.append(f"{name} is missing")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{name} is {value!r}; it must be a number from 1 on")
    for name, values in supported.items():
        if (value := config.get(name, values[0])) not in values:
            problems.append(
                f"{name} is {value!r}; only {' or '.join(map(repr, dict.fromkeys(values)))} is implemented"
            )
    if problems := [*problems, *others]:
        raise ValueError(
            listing(f"this config.json does not describe a model that {model} computes", problems)
        )


def config_to_hf(config: Config, vocab_size: int | None = None) -> dict[str, Any]:
    """The dictionary for `config.json` with which `transformers` computes what our model computes; the inverse of `config_from_hf`.

    No token is named as the beginning or the end of a text: that belongs to the tokenizer.
    """
    if isinstance(config, GPTConfig):
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "vocab_size": vocab_size or config.vocab_size,
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
    rope = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "vocab_size": vocab_size or config.vocab_size,
        "max_position_embeddings": config.max_length,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.width // config.num_heads,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "rope_theta": config.rope_theta,
        "rope_scaling": None
        if rope is None
        else {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low,
            "high_freq_factor": rope.high,
            "original_max_position_embeddings": rope.original_length,
        },
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied,
        "torch_dtype": config.param_dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def config_from_shapes(shapes: Mapping[str, Shape], said: Any = None) -> Config:
    """The configuration of the GPT or Llama whose parameters, by path, have these shapes; ValueError if they are neither's.

    `said` is what the run told of its model (`describe_model`). It is believed where shapes tell nothing: rotations, the epsilon
    of norms, lengths without a table of positions, dropout.
    """
    found = _gpt_from_shapes(shapes) or _llama_from_shapes(shapes)
    if found is None:
        gpt = "'tokens' and 'positions' of two dims and 'blocks/0/attn/qkv/kernel' of four"
        llama = "'tokens' of two dims and 'blocks/0/query', 'key' of three and 'gate' of two"
        raise ValueError(
            f"these {len(shapes)} parameters are neither those of GPT, which has {gpt}, nor of Llama, which has {llama}"
        )
    config = found
    if (
        isinstance(said, dict)
        and said.get("class") == NAME[type(config)]
        and isinstance(said.get("config"), dict)
    ):
        config = _with_said(config, said["config"])
    heads = config.num_heads
    if config.width % heads:
        raise ValueError(f"the width of {config.width} is not divisible by {heads} heads")
    return config


def _gpt_from_shapes(shapes: Mapping[str, Shape]) -> GPTConfig | None:
    stacked = shapes.get("blocks/attn/qkv/kernel")
    kernel = shapes.get("blocks/0/attn/qkv/kernel") if stacked is None else stacked[1:]
    tokens, positions = shapes.get("tokens", ()), shapes.get("positions", ())
    if (
        len(tokens) != 2
        or len(positions) != 2
        or kernel is None
        or len(kernel) != 4
        or 0 in (*tokens, *positions, *kernel)
    ):
        return None
    if kernel[2] * kernel[3] != tokens[1]:
        raise ValueError(
            f"'blocks/0/attn/qkv/kernel' has {kernel[2]} heads of {kernel[3]}, which is not the width of {tokens[1]}"
        )
    return GPTConfig(
        vocab_size=tokens[0],
        max_length=positions[0],
        num_layers=_num_layers(shapes, stacked),
        num_heads=kernel[2],
        width=tokens[1],
        scan_layers=stacked is not None,
    )


def _llama_from_shapes(shapes: Mapping[str, Shape]) -> LlamaConfig | None:
    stacked = shapes.get("blocks/query")
    names = [
        f"blocks/{'' if stacked is not None else '0/'}{name}" for name in ("query", "key", "gate")
    ]
    query, key, gate = (shapes.get(name, ())[0 if stacked is None else 1 :] for name in names)
    tokens = shapes.get("tokens", ())
    if (len(tokens), len(query), len(key), len(gate)) != (2, 3, 3, 2) or 0 in (
        *tokens,
        *query,
        *key,
        *gate,
    ):
        return None
    if query[1] * query[2] != tokens[1] or key[2] != query[2] or query[1] % key[1]:
        raise ValueError(
            f"'{names[0]}' is {query} and '{names[1]}' {key}, which are no heads for a width of {tokens[1]}"
        )
    return LlamaConfig(
        vocab_size=tokens[0],
        num_layers=_num_layers(shapes, stacked),
        num_heads=query[1],
        num_kv_heads=key[1],
        width=tokens[1],
        mlp_width=gate[1],
        tied="head" not in shapes,
        scan_layers=stacked is not None,
    )


def _num_layers(shapes: Mapping[str, Shape], stacked: Shape | None) -> int:
    return (
        stacked[0]
        if stacked is not None
        else len({name.split("/")[1] for name in shapes if name.startswith("blocks/")})
    )


UNSEEN = (
    "dropout",
    "rope_theta",
    "rope_scaling",
    "norm_epsilon",
    "param_dtype",
)  # what leaves no trace in shapes


def _with_said(config: Config, said: Mapping[str, Any]) -> Config:
    """Only values of the type that they must have are taken."""
    taken: dict[str, Any] = {}
    for name in (*UNSEEN, *(["max_length"] if isinstance(config, LlamaConfig) else [])):
        value = said.get(name)
        if (
            name == "rope_scaling"
            and isinstance(value, dict)
            and set(value) == {f.name for f in fields(RopeScaling)}
        ):
            if all(isinstance(number, int | float) and number > 0 for number in value.values()):
                taken[name] = RopeScaling(**value)
        elif name == "param_dtype":
            if value in ("float32", "bfloat16", "float16"):
                taken[name] = value
        elif isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            taken[name] = type(getattr(config, name))(value) if hasattr(config, name) else value
    known = {f.name for f in fields(config)}
    return type(config)(
        **{f.name: getattr(config, f.name) for f in fields(config)}
        | {n: v for n, v in taken.items() if n in known}
    )


def differences(ours: Config, theirs: Config) -> list[str]:
    """What the two compute in different ways, although the shapes of their tensors may be the same."""
    if type(ours) is not type(theirs):
        return [f"it is a {NAME[type(theirs)]}, this model a {NAME[type(ours)]}"]
    names = ("num_heads", "num_kv_heads", "rope_theta", "rope_scaling", "norm_epsilon", "tied")
    pairs = ((name, getattr(theirs, name, None), getattr(ours, name, None)) for name in names)
    return [f"it has {name}={a}, this model {name}={b}" for name, a, b in pairs if a != b]


def listing(fact: str, problems: Iterable[str]) -> str:
    return "\n  ".join([f"{fact}:", *problems])
