"""Measure how fast `stream` generates text, with and without a KV cache: `python -m
benchmarks.sampling`.

Models are presets of the GPT-2 family with random float32 weights. They generate one text from a
prompt of 16 tokens. The FLOPs do not depend on the weights. The first two tokens are not counted,
because they wait for the compiler. Both ways run in turn, and the best round counts, because other
load on the machine only makes it slower. The benchmark checks that both generate the same tokens.
"""

import argparse
import time
from dataclasses import replace

import jax
import numpy as np
from flax import nnx

from benchmarks.record import describe
from shardwise.models.gpt import GPT, PRESETS
from shardwise.models.sampling import Sampling, stream

PROMPT = 16


def measure(model: GPT, new: int, cached: bool) -> tuple[float, list[int]]:
    """Return the tokens per second, and the tokens."""
    prompt = np.random.default_rng(0).integers(0, 256, (1, PROMPT))
    times, tokens = [], []
    for token in stream(
        model, prompt, new, jax.random.key(0), Sampling(0.0), cached=cached
    ):
        times.append(time.perf_counter())
        tokens.append(int(token[0]))
    return (len(times) - 2) / (times[-1] - times[1]), tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--presets", nargs="+", choices=list(PRESETS), default=["byte", "gpt2"]
    )
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[64, 240], help="tokens to generate"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    about = describe(jax.default_backend())
    print(f"{about['hardware']}; jax {about['versions']['jax']}\n")
    print(
        "| preset | tokens | tokens/s | without cache | ratio |\n| --- | --- | --- | --- | --- |"
    )
    for preset in options.presets:
        config = replace(
            PRESETS[preset],
            max_length=max(PRESETS[preset].max_length, PROMPT + max(options.tokens)),
        )
        with nnx.use_eager_sharding(False):
            model = nnx.jit(lambda config=config: GPT(config, nnx.Rngs(0)))()
        for new in options.tokens:
            found = [
                [measure(model, new, cached) for cached in (True, False)]
                for _ in range(options.rounds)
            ]
            assert len({tuple(tokens) for pair in found for _, tokens in pair}) == 1, (
                "the texts differ"
            )
            fast, slow = (max(pair[way][0] for pair in found) for way in (0, 1))
            print(
                f"| `{preset}` | {new} | {fast:,.0f} | {slow:,.1f} | {fast / slow:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
