"""The same training step in PyTorch, to stand beside benchmarks/gpt2.py: GPT-2 with `torch.compile`, flash attention, fused
AdamW, clipping and bfloat16 autocast over float32 weights.

python benchmarks/gpt2_torch.py --rows 32

"""

import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocab: int = 50304, length: int = 1024, layers: int = 12, heads: int = 12, width: int = 768):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif "norm" not in name:
                nn.init.zeros_(parameter)

    def forward(self, tokens, labels):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def measure(rows: int, length: int, count: int) -> None:
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = GPT(length=length).cuda()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = torch.randint(0, 50257, (8, rows, length + 1), device="cuda")

    def step(i: int):
        batch = data[i % 8]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for i in range(20):
        loss = step(i)
    times = []
    for _ in range(max(1, count // 20)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(20):
            loss = step(i)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 20)
    seconds = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{rows:4d} rows: {seconds * 1e3:8.2f} ms, {rows * length / seconds:10,.0f} tokens/s, loss {loss.item():.3f}, peak {peak:.1f} GiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for rows in options.rows:
        measure(rows, options.length, options.steps)


if __name__ == "__main__":
    main()
