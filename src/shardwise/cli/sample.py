"""`shardwise sample`: text from a trained or a published model, as it comes."""

import argparse
import os
import sys
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.reader import step_name
from shardwise.errors import CheckpointError, ConfigError, Parser, ShardwiseError

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.data.tokenizers import Tokenizer

Answer = dict[str, Any]

HELP = """\
RUN is a run directory, one of its checkpoints, a directory as published on the Hugging Face Hub (config.json, safetensors,
tokenizer.json), or hf:owner/name. A GPT or a Llama is known by its arrays; nothing in RUN is executed. For any other model
name its recipe with --recipe, followed by the arguments of the recipe.
"""


def main(args: list[str], options: argparse.Namespace) -> tuple[Answer, int]:
    """Writes the text to standard output; returns it with its tokens, and the exit code."""
    parser = Parser(
        prog="shardwise sample",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN")
    parser.add_argument(
        "--prompt", required=True, help="the text to continue; - reads it from standard input"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=200,
        help="how many to add at most (200); the end of a text ends it earlier",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: always the likeliest token (0.8)"
    )
    parser.add_argument("--top-k", type=int, help="draw from the so many likeliest tokens only")
    parser.add_argument(
        "--top-p",
        type=float,
        help="draw from the likeliest tokens only that together have this probability",
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text (0)")
    parser.add_argument("--num", type=int, default=1, help="so many texts at once (1)")
    parser.add_argument(
        "--step", type=step_name, help="this step of the run, or 'best', rather than the newest"
    )
    parser.add_argument(
        "--average", action="store_true", help="the averaged weights that the optimizer keeps"
    )
    parser.add_argument(
        "--tokenizer", help="the tokenizer.json, or 'bytes', where RUN does not tell"
    )
    parser.add_argument(
        "--mesh",
        help="such as model=2: cut the model over all devices; otherwise it is on the first",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of weights and arithmetic, rather than that of the weights",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="compute all tokens again for each new one; the text is the same",
    )
    parser.add_argument(
        "--recipe", help="file.py or file.py:function that gives the model; its file is run"
    )
    chosen, rest = parser.parse_known_args(args)
    if rest and chosen.recipe is None:
        raise ConfigError(
            f"shardwise sample: there is no argument {' '.join(rest)}; arguments of a recipe need --recipe."
        )
    for name in ("tokens", "num"):
        if getattr(chosen, name) < 1:
            raise ConfigError(f"--{name} {getattr(chosen, name)}: it must be at least 1.")
    prompt = (
        sys.stdin.buffer.read()
        if chosen.prompt == "-"
        else chosen.prompt.encode(errors="surrogateescape")
    )
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False)
    with console.status("importing JAX"):
        found = _find(chosen, rest, options)
    return _write(found, prompt, chosen, console)


@dataclass(frozen=True)
class _Found:
    """A model, and what its tokens mean."""

    place: Path
    factory: Callable[..., Any]
    tokenizer: "Tokenizer"
    published: bool
    rules: Any = None
    window: int | None = None
    vocab_size: int | None = None  # rows of its table


# Which model


def _find(chosen: argparse.Namespace, rest: list[str], options: argparse.Namespace) -> _Found:
    from shardwise.checkpoint.reader import find_step, read_json, read_step
    from shardwise.mesh import use_cpu_devices
    from shardwise.models.llama import LlamaConfig
    from shardwise.weights.hf_config import config_from_hf, model_of
    from shardwise.weights.hub import locate, weights_in

    if options.cpu_devices is not None:
        use_cpu_devices(options.cpu_devices)
    place = locate(chosen.run)
    published = bool(weights_in(place))
    if published and (chosen.step is not None or chosen.average):
        raise ConfigError(
            f"{place} has neither steps nor averages; leave --step and --average out."
        )
    saved = (
        None if published else read_step(find_step(place, chosen.step))
    )  # its files are verified before any array is read
    tokenizer = _tokenizer(chosen, place, saved)
    if chosen.recipe is not None:
        return _from_recipe(
            chosen,
            rest,
            _Found(saved.directory if saved else place, lambda _: None, tokenizer, published),
        )
    try:
        if saved is not None:
            from shardwise.weights.export import config_of
            from shardwise.weights.load import merged_step

            config = config_of(merged_step(saved))
        else:
            folder = place if place.is_dir() else place.parent
            config = config_from_hf(read_json(folder / "config.json"))
    except ValueError as error:
        remedy = f"Name the recipe of the run, which is then run: --recipe {_noted(saved)} [its arguments]."
        raise CheckpointError(
            f"{saved.directory if saved else place} cannot be sampled as it is: {error}. {remedy}"
        ) from error
    if isinstance(config, LlamaConfig) and chosen.dtype is not None:
        config = replace(config, param_dtype=chosen.dtype)
    factory = lambda rngs: model_of(config, rngs)  # noqa: E731
    return _Found(
        saved.directory if saved else place,
        factory,
        tokenizer,
        published,
        vocab_size=config.vocab_size,
    )


def can_sample(run: Path) -> bool:
    """Whether `shardwise sample RUN` needs nothing else: there is a checkpoint, of a model that is known by its arrays, of known tokens."""
    from shardwise.checkpoint.reader import find_step, read_step
    from shardwise.weights.export import config_of
    from shardwise.weights.hub import tokenizer_of
    from shardwise.weights.load import merged_step

    try:
        saved = read_step(find_step(run))
        config_of(merged_step(saved))
        return tokenizer_of(saved) is not None
    except (ShardwiseError, ValueError, OSError):
        return False


def _noted(saved: Any) -> str:
    """The recipe that a run says it had, to be shown; it is not looked at."""
    recipe = saved.metadata.get("recipe") if saved is not None else None
    return (
        recipe
        if isinstance(recipe, str) and recipe.isprintable() and len(recipe) < 200
        else "FILE.py"
    )


def _from_recipe(chosen: argparse.Namespace, rest: list[str], found: _Found) -> _Found:
    from shardwise.recipe import bind_recipe, find_recipe, load_recipe, make_run

    recipe = load_recipe(*find_recipe(chosen.recipe))
    run = make_run(
        recipe,
        bind_recipe(recipe, rest, prog=f"shardwise sample {chosen.run} --recipe {chosen.recipe}"),
    )
    batch = run.data.example() if hasattr(run.data, "example") else {}
    lengths = (
        {leaf.shape[1] for leaf in batch.values() if leaf.ndim == 2}
        if isinstance(batch, dict)
        else set()
    )
    # Longer rows than those that it learned from may have no meaning to it. A model with a length of its own says so itself.
    return replace(
        found,
        factory=run.model,
        rules=run.rules,
        window=lengths.pop() if len(lengths) == 1 else None,
    )


def _tokenizer(chosen: argparse.Namespace, place: Path, saved: Any) -> "Tokenizer":
    from shardwise.data.tokenizers import Bytes, FromFile
    from shardwise.weights.hub import tokenizer_of

    if chosen.tokenizer is not None:
        return Bytes() if chosen.tokenizer == "bytes" else FromFile(Path(chosen.tokenizer))
    if saved is not None:
        if (known := tokenizer_of(saved)) is None:
            raise ConfigError(
                f"{saved.directory} does not tell what its tokens mean, or the tokenizer.json it names is neither in the run's directory "
                "nor where its arguments lead. Say it: --tokenizer FILE, or --tokenizer bytes."
            )
        return known
    folder = place if place.is_dir() else place.parent
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json. Say where there is one: --tokenizer FILE, or --tokenizer bytes."
        )
    return FromFile(folder / "tokenizer.json")


def _load(found: _Found, chosen: argparse.Namespace) -> Any:
    """The model, its weights where the mesh wants them."""
    import jax
    import jax.numpy as jnp
    import optax

    from shardwise.checkpoint.init_from import InitFrom
    from shardwise.mesh import make_mesh
    from shardwise.runtime import use_compilation_cache
    from shardwise.state import abstract_state
    from shardwise.weights.load import load_initial

    use_compilation_cache()
    mesh = make_mesh("data=1", jax.devices()[:1]) if chosen.mesh is None else make_mesh(chosen.mesh)
    spec = abstract_state(found.factory, optax.identity(), mesh, found.rules)
    state, _ = load_initial(InitFrom(found.place, average=chosen.average, cast=True), spec, seed=0)
    if chosen.dtype is not None:
        cast = lambda leaf: (
            leaf.astype(chosen.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        )  # noqa: E731
        state = replace(state, params=jax.tree.map(cast, state.params))
    return spec.module(state)


# Text


def _write(
    found: _Found, prompt: bytes, chosen: argparse.Namespace, console: "Console"
) -> tuple[Answer, int]:
    import jax

    from shardwise.models.sampling import Sampling, stream

    tokenizer = found.tokenizer
    tokens = _encode(prompt, found)
    try:
        sampling = Sampling(chosen.temperature, chosen.top_k, chosen.top_p, tokenizer.vocab_size)
    except ValueError as error:
        raise ConfigError(f"shardwise sample: {error}.") from None
    with console.status(f"reading {found.place}"):
        model = _load(found, chosen)
        limit = getattr(getattr(model, "config", None), "max_length", None)
    following = stream(
        model,
        [tokens] * chosen.num,
        chosen.tokens,
        jax.random.key(chosen.seed),
        sampling,
        window=None if limit else found.window,
        cached=not chosen.no_cache,
    )
    end = tokenizer.end_token(None)
    texts = [_Text(tokenizer, tokens, end) for _ in range(chosen.num)]
    out = _Out(sys.stdout)
    code, begun, first, count = 0, time.monotonic(), None, 0
    try:
        for number, text in enumerate(texts):
            if chosen.num > 1:
                out.write(f"{'' if number == 0 else chr(10)}--- {number + 1} of {chosen.num}\n")
            out.write(texts[0].shown if number == 0 else text.shown + text.text)
            for new in following if number == 0 else ():
                first = first or time.monotonic()
                count += 1
                parts = [one.push(int(token)) for one, token in zip(texts, new, strict=True)]
                out.write(parts[0])
                if all(one.ended for one in texts):
                    break
            if number == 0:
                for one in texts:
                    one.flush()
                out.write(texts[0].rest)
            out.write("" if (text.shown + text.text).endswith("\n") else "\n")
    except KeyboardInterrupt:
        out.write("\n")
        code = 130
    except ValueError as error:
        raise CheckpointError(f"{found.place}: {error}.") from error
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    now = time.monotonic()
    rate = (
        (count - 1) * chosen.num / (now - first)
        if first is not None and count > 1 and now > first
        else None
    )
    if sys.stderr.isatty():
        speed = f", {rate:,.0f} tokens/s" if rate else ""
        print(
            f"{count * chosen.num} tokens, the first after {(first or now) - begun:.1f} s{speed}",
            file=sys.stderr,
        )
    answer: Answer = {
        "source": str(found.place),
        "prompt": tokenizer.decode(tokens),
        "prompt_tokens": tokens,
        "continuations": [
            {"text": one.text, "tokens": one.tokens, "ended": one.ended} for one in texts
        ],
        "tokens_per_second": rate,
    }
    return answer, code


def _encode(prompt: bytes, found: _Found) -> list[int]:
    """The tokens of the prompt; a published model gets those at the beginning, too, that its tokenizer adds."""
    tokenizer = found.tokenizer
    try:
        tokens: list[int] = tokenizer.encode([prompt], special_tokens=found.published)[0].tolist()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt is no UTF-8 text: {error}.") from None
    if not tokens:
        end = tokenizer.end_token(None)  # also what stands between two texts
        if end is None:
            raise ConfigError(
                "the prompt is empty, and the tokenizer has no token for the end of a text to begin with."
            )
        tokens = [end]
    if found.vocab_size is not None and max(tokens) >= found.vocab_size:
        what = f"the prompt has token {max(tokens)}, and the model knows {found.vocab_size}"
        raise ConfigError(f"{what}: '{tokenizer.name}' is not the tokenizer of {found.place}.")
    return tokens


class _Text:
    """Tokens as text that only grows: what ends in the middle of a character waits for the rest of it."""

    CONTEXT, WAIT = (
        8,
        4,
    )  # tokens that are decoded again, for spaces between words; bytes of the longest character

    def __init__(self, tokenizer: "Tokenizer", prompt: list[int], end: int | None):
        self.tokenizer, self.end = tokenizer, end
        self.shown, self.text, self.rest = tokenizer.decode(prompt), "", ""
        self.tokens: list[int] = []
        self.ended = False
        self._recent, self._waiting = prompt[-self.CONTEXT :], 0
        self._told = tokenizer.decode(self._recent)

    def push(self, token: int) -> str:
        """What can be told now."""
        if self.ended:
            return ""
        self.tokens.append(token)
        if token == self.end:
            self.ended = True
            return ""
        self._recent.append(token)
        self._waiting += 1
        text = self.tokenizer.decode(self._recent)
        if text.endswith("\ufffd") and self._waiting < self.WAIT:
            return ""
        return self._tell(text)

    def flush(self) -> None:
        self.rest = self._tell(self.tokenizer.decode(self._recent)) if self._waiting else ""

    def _tell(self, text: str) -> str:
        new = text[len(self._told) :]
        self.text += new
        self._waiting = 0
        self._recent = self._recent[-self.CONTEXT :]
        self._told = self.tokenizer.decode(self._recent)
        return new


class _Out:
    """Standard output, at once. A terminal gets nothing that it would take for a command."""

    def __init__(self, file: Any):
        self.file, self.is_terminal = file, file.isatty()

    def write(self, text: str) -> None:
        if self.is_terminal:
            text = "".join(
                c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text
            )
        self.file.write(text)
        self.file.flush()
