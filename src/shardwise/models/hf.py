"""Published GPT-2 weights in and out, by the names and shapes of `transformers`.

Only NumPy arrays pass through here, so any reader of weight files serves and neither torch nor transformers is needed.
`transformers` also keeps kernels as (in, out), so each tensor is a renamed reshape of ours and nothing is transposed.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardwise.models.gpt import GPTConfig

Shape = tuple[int, ...]

PREFIX = "transformer."  # GPT2LMHeadModel writes it before every name, GPT2Model and the files of OpenAI's weights do not
EMBEDDING = "wte.weight"
HEAD = "lm_head.weight"
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # the causal mask, which older versions saved beside the weights


def config_from_hf(config: Mapping[str, Any]) -> GPTConfig:
    """Our configuration from the dictionary in `config.json`; ValueError with all that this GPT does not compute.

    The vocabulary is the published one, not rounded up, and dropout is off: it belongs to a run, not to the weights.
    """
    names = ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")
    problems = [f"{name} is missing" for name in names if name not in config]
    inner = 4 * config["n_embd"] if "n_embd" in config else None
    supported: dict[str, tuple[Any, ...]] = {  # the first value is what transformers takes for an absent key
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new",),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, inner),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
        "add_cross_attention": (False,),
    }
    for name, values in supported.items():
        if (value := config.get(name, values[0])) not in values:
            problems.append(f"{name} is {value!r}; only {' or '.join(map(repr, values))} is implemented")
    if problems:
        raise ValueError(_listing("this config.json does not describe a model that GPT computes", problems))
    vocab_size, max_length, num_layers, num_heads, width = (int(config[name]) for name in names)
    return GPTConfig(vocab_size=vocab_size, max_length=max_length, num_layers=num_layers, num_heads=num_heads, width=width)


def config_to_hf(config: GPTConfig, vocab_size: int | None = None) -> dict[str, Any]:
    """The dictionary for `config.json` with which GPT2LMHeadModel computes what GPT computes; the inverse of `config_from_hf`.

    No token is named as the beginning or the end of a text: that belongs to the tokenizer.
    """
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


def is_hf(names: Iterable[str]) -> bool:
    """Whether tensors of these names are a GPT-2 of `transformers`."""
    return {EMBEDDING, "wpe.weight"} <= {name.removeprefix(PREFIX) for name in names}


def config_from_shapes(shapes: Mapping[str, Shape]) -> GPTConfig:
    """The configuration of the GPT whose parameters, by path, have these shapes; ValueError if they are not those of a GPT.

    All of it but dropout and remat, which leave no trace in the parameters.
    """
    stacked = shapes.get("blocks/attn/qkv/kernel")
    kernel = shapes.get("blocks/0/attn/qkv/kernel") if stacked is None else stacked[1:]
    tokens, positions = shapes.get("tokens", ()), shapes.get("positions", ())
    if len(tokens) != 2 or len(positions) != 2 or kernel is None or len(kernel) != 4 or 0 in (*tokens, *positions, *kernel):
        needed = "'tokens' and 'positions' of two dims and 'blocks/0/attn/qkv/kernel' of four"
        raise ValueError(f"these {len(shapes)} parameters are not those of GPT, which has {needed}")
    config = GPTConfig(
        vocab_size=tokens[0],
        max_length=positions[0],
        num_layers=stacked[0] if stacked is not None else len({name.split("/")[1] for name in shapes if name.startswith("blocks/")}),
        num_heads=kernel[2],
        width=tokens[1],
        scan_layers=stacked is not None,
    )
    if kernel[2] * kernel[3] != config.width:
        raise ValueError(f"'blocks/0/attn/qkv/kernel' has {kernel[2]} heads of {kernel[3]}, which is not the width of {config.width}")
    return config


def params_from_hf(tensors: Mapping[str, np.ndarray], config: GPTConfig) -> dict[str, Any]:
    """The parameters of `GPT(config)`, float32, as the nested dictionary that `split_module` yields.

    Names may carry the prefix "transformer." or not. A vocabulary smaller than ours is filled up with the mean of
    its rows: such a token gets the mean of all logits, so at most the average probability. Rows of zeros would get logit
    0, which is very likely where published logits are all far below it.
    """
    table = _table(config)
    given: dict[str, np.ndarray] = {}
    problems = []
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix(PREFIX)
        if BUFFERS.fullmatch(name):
            continue
        if name in given:
            problems.append(f"twice: '{name}', with and without the prefix '{PREFIX}'")
        given[name] = np.asarray(tensor)
    head = given.pop(HEAD, None)
    shapes = {name: entry.theirs for name, entry in table.items()}
    rows = given[EMBEDDING].shape[:1] if EMBEDDING in given else ()
    if rows and 0 < rows[0] <= config.vocab_size:
        shapes[EMBEDDING] = (*rows, config.width)
    problems += _differences(shapes, {name: tensor.shape for name, tensor in given.items()})
    if head is not None and EMBEDDING in given and not np.array_equal(head, given[EMBEDDING]):
        problems.append(f"untied: '{HEAD}' is not equal to '{EMBEDDING}', and GPT uses the embedding as output layer")
    if problems:
        raise ValueError(_listing("these tensors are not those of GPT with this configuration", problems))

    params: dict[str, Any] = {}
    for name, entry in table.items():
        value = given[name].astype(np.float32)
        if name == EMBEDDING:
            value = np.concatenate([value, np.tile(value.mean(0), (config.vocab_size - len(value), 1))])
        *parents, last = entry.path.split("/")
        node = params
        for part in parents:
            node = node.setdefault(part, {})
        if entry.layer is None:
            node[last] = value.reshape(entry.ours)
        else:
            node.setdefault(last, np.empty((config.num_layers, *entry.ours), np.float32))[entry.layer] = value.reshape(entry.ours)
    return params


def params_to_hf(params: Mapping[str, Any], config: GPTConfig, vocab_size: int | None = None) -> dict[str, np.ndarray]:
    """The inverse of `params_from_hf`, under the names of GPT2LMHeadModel; `vocab_size` cuts the embedding to so many rows."""
    if vocab_size is not None and not 0 < vocab_size <= config.vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}; the model has {config.vocab_size} rows, so it must be from 1 to that")
    table = _table(config)
    shapes = {e.path: e.ours if e.layer is None else (config.num_layers, *e.ours) for e in table.values()}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    given = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf, np.float32) for path, leaf in leaves}
    if problems := _differences(shapes, {name: leaf.shape for name, leaf in given.items()}):
        raise ValueError(_listing("these parameters are not those of GPT with this configuration", problems))
    tensors = {}
    for name, entry in table.items():
        leaf = given[entry.path]
        value = (leaf if entry.layer is None else leaf[entry.layer]).reshape(entry.theirs)
        tensors[PREFIX + name] = value[:vocab_size] if name == EMBEDDING else value
    return tensors


@dataclass(frozen=True)
class _Entry:
    """Where a tensor of theirs stands in our tree; `layer` is its index in a stack of all layers."""

    path: str
    layer: int | None
    theirs: Shape
    ours: Shape


def _table(config: GPTConfig) -> dict[str, _Entry]:
    """Every tensor by its name in transformers, without prefix."""
    c, d, heads = config, config.width, (config.num_heads, config.width // config.num_heads)
    block: dict[str, tuple[str, Shape, Shape]] = {
        "ln_1.weight": ("norm1/scale", (d,), (d,)),
        "ln_1.bias": ("norm1/bias", (d,), (d,)),
        "attn.c_attn.weight": ("attn/qkv/kernel", (d, 3 * d), (d, 3, *heads)),
        "attn.c_attn.bias": ("attn/qkv/bias", (3 * d,), (3, *heads)),
        "attn.c_proj.weight": ("attn/out/kernel", (d, d), (*heads, d)),
        "attn.c_proj.bias": ("attn/out/bias", (d,), (d,)),
        "ln_2.weight": ("norm2/scale", (d,), (d,)),
        "ln_2.bias": ("norm2/bias", (d,), (d,)),
        "mlp.c_fc.weight": ("mlp/up/kernel", (d, 4 * d), (d, 4 * d)),
        "mlp.c_fc.bias": ("mlp/up/bias", (4 * d,), (4 * d,)),
        "mlp.c_proj.weight": ("mlp/down/kernel", (4 * d, d), (4 * d, d)),
        "mlp.c_proj.bias": ("mlp/down/bias", (d,), (d,)),
    }
    table = {
        EMBEDDING: _Entry("tokens", None, (c.vocab_size, d), (c.vocab_size, d)),
        "wpe.weight": _Entry("positions", None, (c.max_length, d), (c.max_length, d)),
    }
    for i in range(c.num_layers):
        for name, (path, theirs, ours) in block.items():
            entry = _Entry(f"blocks/{path}", i, theirs, ours) if c.scan_layers else _Entry(f"blocks/{i}/{path}", None, theirs, ours)
            table[f"h.{i}.{name}"] = entry
    table["ln_f.weight"] = _Entry("norm/scale", None, (d,), (d,))
    table["ln_f.bias"] = _Entry("norm/bias", None, (d,), (d,))
    return table


def _differences(expected: Mapping[str, Shape], given: Mapping[str, Shape]) -> list[str]:
    missing = [f"missing: '{name}' {shape}" for name, shape in expected.items() if name not in given]
    unexpected = [f"unexpected: '{name}' {shape}" for name, shape in given.items() if name not in expected]
    both = [(name, shape, given[name]) for name, shape in expected.items() if name in given]
    return missing + unexpected + [f"wrong shape: '{name}' is {got}, must be {want}" for name, want, got in both if got != want]


def _listing(fact: str, problems: Iterable[str]) -> str:
    return "\n  ".join([f"{fact}:", *problems])
