"""Published GPT-2 and Llama weights in and out, by the names and shapes of `transformers`.

Only NumPy arrays pass through here, so any reader of weight files serves and neither torch nor transformers is needed.
`transformers` keeps kernels of GPT-2 as (in, out) and those of Llama as (out, in); beyond that, each tensor is a renamed reshape of ours.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.models.gpt import GPTConfig
from shardwise.models.llama import LlamaConfig
from shardwise.weights.hf_config import NAME, Config, Shape, listing

# What stands before most names in files, but not in all of them: GPT2LMHeadModel writes it, GPT2Model and OpenAI's files do not.
PREFIX = {GPTConfig: "transformer.", LlamaConfig: "model."}
EMBEDDING = {GPTConfig: "wte.weight", LlamaConfig: "embed_tokens.weight"}
HEAD = "lm_head.weight"
BUFFERS = re.compile(
    r"h\.\d+\.attn\.(bias|masked_bias)|layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)  # older versions saved them, too


def kind_of(names: Iterable[str]) -> type[Config] | None:
    """Which architecture of `transformers` tensors of these names are."""
    given = set(names)
    marks = {GPTConfig: "wpe.weight", LlamaConfig: "layers.0.self_attn.q_proj.weight"}
    for kind, mark in marks.items():
        if all({PREFIX[kind] + name, name} & given for name in (EMBEDDING[kind], mark)):
            return kind
    return None


def params_from_hf(tensors: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The parameters of the model of `config`, as the nested dictionary that `split_module` yields; float32, or Llama's `param_dtype`.

    Names may carry the usual prefix or not. `tensors` may be anything with a shape that NumPy can convert; one is converted at a
    time. A vocabulary smaller than ours is filled up with the mean of its rows: such a token gets the mean of all logits, so at
    most the average probability. Rows of zeros would get logit 0, which is very likely where published logits are all far below it.
    """
    prefix, embedding, model = PREFIX[type(config)], EMBEDDING[type(config)], NAME[type(config)]
    table = _table(config)
    given: dict[str, Any] = {}
    problems = []
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix(prefix)
        if BUFFERS.fullmatch(name):
            continue
        if name in given:
            problems.append(f"twice: '{name}', with and without the prefix '{prefix}'")
        given[name] = tensor
    head = given.pop(HEAD, None) if HEAD not in table else None
    shapes = {name: entry.theirs for name, entry in table.items()}
    rows = tuple(given[embedding].shape[:1]) if embedding in given else ()
    if rows and 0 < rows[0] <= config.vocab_size:
        shapes |= {name: (*rows, config.width) for name in (embedding, HEAD) if name in shapes}
    problems += _differences(shapes, {name: tuple(tensor.shape) for name, tensor in given.items()})
    if (
        head is not None
        and embedding in given
        and not np.array_equal(np.asarray(head), np.asarray(given[embedding]))
    ):
        problems.append(
            f"untied: '{HEAD}' is not equal to '{embedding}', and {model} uses the embedding as output layer"
        )
    if problems:
        raise ValueError(
            listing(f"these tensors are not those of {model} with this configuration", problems)
        )

    params: dict[str, Any] = {}
    dtype = jnp.dtype(getattr(config, "param_dtype", "float32"))
    for name, entry in table.items():
        value = np.asarray(given[name]).astype(dtype)
        if name in (embedding, HEAD) and len(value) < config.vocab_size:
            mean = value.astype(np.float32).mean(0).astype(dtype)
            value = np.concatenate([value, np.tile(mean, (config.vocab_size - len(value), 1))])
        value = (value.T if entry.transposed else value).reshape(entry.ours)
        *parents, last = entry.path.split("/")
        node = params
        for part in parents:
            node = node.setdefault(part, {})
        if entry.layer is None:
            node[last] = value
        else:
            node.setdefault(last, np.empty((config.num_layers, *entry.ours), dtype))[
                entry.layer
            ] = value
    return params


def params_to_hf(
    params: Mapping[str, Any], config: Config, vocab_size: int | None = None
) -> dict[str, np.ndarray]:
    """The inverse of `params_from_hf`, under the names of GPT2LMHeadModel or LlamaForCausalLM.

    `vocab_size` cuts the embedding, and the output layer where there is one, to so many rows.
    """
    if vocab_size is not None and not 0 < vocab_size <= config.vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}; the model has {config.vocab_size} rows, so it must be from 1 to that"
        )
    table = _table(config)
    shapes = {
        e.path: e.ours if e.layer is None else (config.num_layers, *e.ours) for e in table.values()
    }
    leaves = jax.tree_util.tree_leaves_with_path(params)
    given = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in leaves
    }
    if problems := _differences(shapes, {name: leaf.shape for name, leaf in given.items()}):
        raise ValueError(
            listing(
                f"these parameters are not those of {NAME[type(config)]} with this configuration",
                problems,
            )
        )
    tensors = {}
    for name, entry in table.items():
        leaf = given[entry.path] if entry.layer is None else given[entry.path][entry.layer]
        value = (
            leaf.reshape(entry.theirs[::-1]).T if entry.transposed else leaf.reshape(entry.theirs)
        )
        full_name = name if name == HEAD else PREFIX[type(config)] + name
        tensors[full_name] = (
            value[:vocab_size] if name in (EMBEDDING[type(config)], HEAD) else value
        )
    return tensors


@dataclass(frozen=True)
class _Entry:
    """Where a tensor of theirs stands in our tree; `layer` is its index in a stack of all layers."""

    path: str
    layer: int | None
    theirs: Shape
    ours: Shape
    transposed: bool = False


def _table(config: Config) -> dict[str, _Entry]:
    """Every tensor by its name in transformers, without prefix."""
    before, layers, block, after = (
        _gpt_table(config) if isinstance(config, GPTConfig) else _llama_table(config)
    )
    table = dict(before)
    for i in range(config.num_layers):
        for name, e in block.items():
            path, layer = (
                (f"blocks/{e.path}", i) if config.scan_layers else (f"blocks/{i}/{e.path}", None)
            )
            table[f"{layers}.{i}.{name}"] = _Entry(path, layer, e.theirs, e.ours, e.transposed)
    return table | after


_Table = tuple[dict[str, _Entry], str, dict[str, _Entry], dict[str, _Entry]]


def _gpt_table(c: GPTConfig) -> _Table:
    d, heads = c.width, (c.num_heads, c.width // c.num_heads)

    def entry(path: str, theirs: Shape, ours: Shape | None = None) -> _Entry:
        return _Entry(path, None, theirs, theirs if ours is None else ours)

    block = {
        "ln_1.weight": entry("norm1/scale", (d,)),
        "ln_1.bias": entry("norm1/bias", (d,)),
        "attn.c_attn.weight": entry("attn/qkv/kernel", (d, 3 * d), (d, 3, *heads)),
        "attn.c_attn.bias": entry("attn/qkv/bias", (3 * d,), (3, *heads)),
        "attn.c_proj.weight": entry("attn/out/kernel", (d, d), (*heads, d)),
        "attn.c_proj.bias": entry("attn/out/bias", (d,)),
        "ln_2.weight": entry("norm2/scale", (d,)),
        "ln_2.bias": entry("norm2/bias", (d,)),
        "mlp.c_fc.weight": entry("mlp/up/kernel", (d, 4 * d)),
        "mlp.c_fc.bias": entry("mlp/up/bias", (4 * d,)),
        "mlp.c_proj.weight": entry("mlp/down/kernel", (4 * d, d)),
        "mlp.c_proj.bias": entry("mlp/down/bias", (d,)),
    }
    before = {
        "wte.weight": entry("tokens", (c.vocab_size, d)),
        "wpe.weight": entry("positions", (c.max_length, d)),
    }
    return (
        before,
        "h",
        block,
        {"ln_f.weight": entry("norm/scale", (d,)), "ln_f.bias": entry("norm/bias", (d,))},
    )


def _llama_table(c: LlamaConfig) -> _Table:
    d, head = c.width, c.width // c.num_heads

    def scale(path: str) -> _Entry:
        return _Entry(path, None, (d,), (d,))

    def kernel(path: str, ins: Shape, outs: Shape) -> _Entry:
        return _Entry(path, None, (math.prod(outs), math.prod(ins)), (*ins, *outs), transposed=True)

    block = {
        "self_attn.q_proj.weight": kernel("query", (d,), (c.num_heads, head)),
        "self_attn.k_proj.weight": kernel("key", (d,), (c.num_kv_heads, head)),
        "self_attn.v_proj.weight": kernel("value", (d,), (c.num_kv_heads, head)),
        "self_attn.o_proj.weight": kernel("out", (c.num_heads, head), (d,)),
        "mlp.gate_proj.weight": kernel("gate", (d,), (c.mlp_width,)),
        "mlp.up_proj.weight": kernel("up", (d,), (c.mlp_width,)),
        "mlp.down_proj.weight": kernel("down", (c.mlp_width,), (d,)),
        "input_layernorm.weight": scale("norm1/scale"),
        "post_attention_layernorm.weight": scale("norm2/scale"),
    }
    head_of = {} if c.tied else {HEAD: kernel("head", (d,), (c.vocab_size,))}
    return (
        {"embed_tokens.weight": _Entry("tokens", None, (c.vocab_size, d), (c.vocab_size, d))},
        "layers",
        block,
        {"norm.weight": scale("norm/scale")} | head_of,
    )


def _differences(expected: Mapping[str, Shape], given: Mapping[str, Shape]) -> list[str]:
    missing = [
        f"missing: '{name}' {shape}" for name, shape in expected.items() if name not in given
    ]
    unexpected = [
        f"unexpected: '{name}' {shape}" for name, shape in given.items() if name not in expected
    ]
    both = [(name, shape, given[name]) for name, shape in expected.items() if name in given]
    return (
        missing
        + unexpected
        + [
            f"wrong shape: '{name}' is {got}, must be {want}"
            for name, want, got in both
            if got != want
        ]
    )
