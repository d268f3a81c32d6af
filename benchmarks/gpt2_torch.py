"""Measure the training step of benchmarks/gpt2.py in PyTorch.

GPT-2 is trained with `torch.compile`, flash attention, fused AdamW, clipping and bfloat16 autocast
with float32 weights.

    python -m benchmarks.gpt2_torch --rows 64 --share FOLDER

FOLDER holds the initial weights and the text that benchmarks/gpt2.py wrote. The model is a compact
one, defined here, or that of `transformers`. `--float8` uses matmuls of 8 bits in its blocks, by
torchao.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.text import FIRST_RATE, RATE, WARMUP, batch, steps_between_looks


class Block(nn.Module):
    """A transformer block of the compact model."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A compact GPT-2."""

    def __init__(
        self,
        length: int,
        vocab: int = 50304,
        layers: int = 12,
        heads: int = 12,
        width: int = 768,
    ):
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocab, width),
            nn.Embedding(length, width),
        )
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens, labels):
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


PARTS = {
    "ln_1": "norm1",
    "ln_2": "norm2",
    "attn.c_attn": "qkv",
    "attn.c_proj": "out",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}


def compact(length: int, weights: dict[str, torch.Tensor]) -> nn.Module:
    """Return the compact model with weights that have the names of `transformers`."""
    model = GPT(length)
    named = {
        "wte.weight": "tokens.weight",
        "wpe.weight": "positions.weight",
        "ln_f.weight": "norm.weight",
        "ln_f.bias": "norm.bias",
    }
    state = {}
    for name, tensor in weights.items():
        name = name.removeprefix("transformer.")
        if name in named:
            state[named[name]] = tensor
        elif name.startswith("h."):
            _, layer, rest = name.split(".", 2)
            part, kind = rest.rsplit(".", 1)
            linear = kind == "weight" and "ln" not in part
            state[f"blocks.{layer}.{PARTS[part]}.{kind}"] = (
                tensor.T if linear else tensor
            )
    model.load_state_dict(state)
    return model


class Hub(nn.Module):
    """The GPT-2 of `transformers`."""

    def __init__(self, length: int, weights: dict[str, torch.Tensor]):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        zero = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=50304,
                n_positions=length,
                attn_implementation="sdpa",
                use_cache=False,
                **zero,
            )
        )
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        assert not unknown
        assert set(missing) <= {"lm_head.weight"}, missing

    def forward(self, tokens, labels):
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def with_float8(model: nn.Module) -> nn.Module:
    """Replace the linear layers of a model by those of torchao, with matmuls of 8 bits."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    return convert_to_float8_training(model, config=config)


def attention_kernels(rows: int, length: int) -> list[str]:
    """Return the names of the kernels that PyTorch uses for attention, forward and backward."""
    q, k, v = (
        torch.randn(
            rows,
            12,
            length,
            64,
            dtype=torch.bfloat16,
            device="cuda",
            requires_grad=True,
        )
        for _ in range(3)
    )
    with torch.profiler.profile() as profile:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    return sorted(name for name in names if "sdpa" in name or "flash" in name)


def measure(
    model: nn.Module,
    tokens: np.ndarray,
    rows: int,
    length: int,
    count: int,
    device: str,
) -> dict[str, Any]:
    """Return step time, losses and memory, measured as benchmarks/gpt2.py does."""
    torch.set_float32_matmul_precision("high")
    model = model.to(device)
    compiled = torch.compile(model)
    fused = device == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=RATE,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        fused=fused,
    )
    wait = torch.cuda.synchronize if fused else lambda: None

    def step(n: int) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = FIRST_RATE + (RATE - FIRST_RATE) * min(n / WARMUP, 1)
        rows_ = batch(tokens, n, rows, length)
        inputs, labels = (
            torch.from_numpy(rows_[name]).long().to(device, non_blocking=True)
            for name in ("inputs", "labels")
        )
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = compiled(inputs, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    start, times, losses, last, every = (
        time.perf_counter(),
        [],
        [],
        None,
        steps_between_looks(count),
    )
    for n in range(1, count + 1):
        losses.append(step(n - 1))
        if n == 1:
            wait()
            compile_s = time.perf_counter() - start
        if n % every == 0:
            wait()
            now = time.perf_counter()
            if last is not None:
                times.append((now - last) / every)
            last = now
    seconds = statistics.median(times[1:] or times)
    return {
        "step_ms": seconds * 1e3,
        "tokens_per_s": rows * length / seconds,
        "compile_s": compile_s,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if fused else 0.0,
        "losses": [float(x) for x in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32, help="sequences per step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument(
        "--model", choices=["compact", "transformers"], default="compact"
    )
    parser.add_argument("--float8", action="store_true", help="matmuls of 8 bits")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--share", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, "
        f"torch {torch.__version__}, {options.model}"
    )
    weights = {
        name: torch.from_numpy(array)
        for name, array in np.load(options.share / "weights.npz").items()
    }
    model = (compact if options.model == "compact" else Hub)(options.length, weights)
    attention = []
    if device == "cuda":
        attention = attention_kernels(options.rows, options.length)
        print(f"cuDNN {torch.backends.cudnn.version()}, attention: {attention}")
    if options.float8:
        model = with_float8(model)
    answer = measure(
        model,
        np.load(options.share / "tokens.npy"),
        options.rows,
        options.length,
        options.steps,
        device,
    )
    print(
        f"{answer['step_ms']:8.2f} ms, {answer['tokens_per_s']:10,.0f} tokens/s, "
        f"loss {answer['losses'][-1]:.3f}, peak {answer['peak_gib']:.1f} GiB, "
        f"compilation {answer['compile_s']:.1f} s",
        flush=True,
    )
    if options.json:
        about = {
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "attention": attention,
        }
        options.json.write_text(json.dumps({**answer, **about}) + "\n")


if __name__ == "__main__":
    main()
