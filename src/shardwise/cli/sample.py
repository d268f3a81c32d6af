"""`shardwise sample`: generate text from a trained or published model, printed as it comes.

A model family that shardwise ships is recognized by its arrays or its config.json; nothing in RUN
is executed. For any other model the user names its recipe, which is executed.
"""

import argparse
import dataclasses
import sys
import time
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from shardwise.cli.options import command_parser
from shardwise.cli.recipes import recorded_recipe
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.runtime import is_lost
from shardwise.text import Json

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from flax import nnx
    from rich.console import Console

    from shardwise.checkpoint.reader import SavedStep
    from shardwise.data.tokenizers import Tokenizer
    from shardwise.module import ModelFactory
    from shardwise.sharding import Rules
    from shardwise.weights.families.base import ModelConfig

# The exit code of a program that Ctrl-C ended.
INTERRUPTED = 130


@dataclass(frozen=True)
class ModelSource:
    """A model to sample from, before its weights are loaded.

    Attributes:
        path: the saved step, or the published files.
        factory: builds the model.
        tokenizer: turns text into its tokens and back.
        is_published: whether these are published weights, not those of a run.
        rules: sharding rules of the recipe, if there is one.
        window: longest sequence to compute at once; None if the model knows its own limit.
        vocab_size: number of tokens that the model knows; None if unknown.
    """

    path: Path
    factory: "ModelFactory"
    tokenizer: "Tokenizer"
    is_published: bool
    rules: "Rules | None" = None
    window: int | None = None
    vocab_size: int | None = None


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise sample`; return what `--json` writes, and the exit code."""
    options, recipe_args = command_parser("sample").parse_known_args(args)
    if recipe_args and options.recipe is None:
        unknown = " ".join(recipe_args)
        raise ConfigError(
            f"shardwise sample: unknown argument {unknown}. Arguments of a recipe need --recipe."
        )
    for name in ("tokens", "num"):
        if getattr(options, name) < 1:
            raise ConfigError(
                f"--{name} {getattr(options, name)}: it must be at least 1."
            )
    if options.prompt == "-":
        prompt = sys.stdin.buffer.read()
    else:
        prompt = options.prompt.encode(errors="surrogateescape")
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False)
    with console.status("importing JAX"):
        source = _find_source(options, recipe_args, shared)
    return _generate(source, prompt, options, console)


def can_sample(run: Path) -> bool:
    """Return whether `shardwise sample RUN` works without further options.

    It needs a checkpoint of a model that is recognized by its arrays, and a known tokenizer.
    """
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


# Which model


def _find_source(
    options: argparse.Namespace, recipe_args: list[str], shared: argparse.Namespace
) -> ModelSource:
    from shardwise.checkpoint.reader import find_step, read_step
    from shardwise.mesh import use_cpu_devices
    from shardwise.weights.hub import locate, weights_in

    if shared.cpu_devices is not None:
        use_cpu_devices(shared.cpu_devices)
    place = locate(options.run)
    is_published = bool(weights_in(place))
    if is_published and (options.step is not None or options.average):
        raise ConfigError(
            f"{place} has neither steps nor averages. Drop --step and --average."
        )
    # The files of a step are verified before any array is read.
    saved = None if is_published else read_step(find_step(place, options.step))
    path = place if saved is None else saved.directory
    tokenizer = _find_tokenizer(options, place, saved)
    if options.recipe is not None:
        return _source_of_recipe(options, recipe_args, path, tokenizer, is_published)
    return _source_of_files(options, place, saved, tokenizer)


def _source_of_files(
    options: argparse.Namespace,
    place: Path,
    saved: "SavedStep | None",
    tokenizer: "Tokenizer",
) -> ModelSource:
    """Recognize the model by its arrays or its config.json."""
    from shardwise.checkpoint.reader import read_json
    from shardwise.weights.export import config_of
    from shardwise.weights.hf_config import config_from_hf, model_of
    from shardwise.weights.load import merged_step

    path = place if saved is None else saved.directory
    try:
        if saved is not None:
            config = config_of(merged_step(saved))
        else:
            config = config_from_hf(read_json(_folder(place) / "config.json"))
            _check_sizes(config, place)
    except ValueError as error:
        recipe = recorded_recipe(saved.metadata if saved is not None else {})
        raise CheckpointError(
            f"{path} cannot be sampled as it is: {error}. Name the recipe of the run, which is then"
            f" executed: --recipe {recipe} [its arguments]."
        ) from error
    has_param_dtype = any(
        field.name == "param_dtype" for field in dataclasses.fields(config)
    )
    if has_param_dtype and options.dtype is not None:
        config = replace(config, param_dtype=options.dtype)

    def factory(rngs: "nnx.Rngs") -> "nnx.Module":
        return model_of(config, rngs)

    return ModelSource(
        path, factory, tokenizer, saved is None, vocab_size=config.vocab_size
    )


def _check_sizes(config: "ModelConfig", place: Path) -> None:
    """Refuse a model that its weights cannot fill, before it is built.

    Other sizes are compared with the shapes of the tensors when they are loaded.
    """
    from shardwise.weights.hub import open_weights, weights_in

    tensors = open_weights(weights_in(place)).values()
    # Each layer has several tensors, and the embedding has one row per token.
    most_rows = max((tensor.shape[0] for tensor in tensors if tensor.shape), default=0)
    if config.num_layers > len(tensors) or config.vocab_size > most_rows:
        raise CheckpointError(
            f"{_folder(place) / 'config.json'} describes {config.num_layers:,} layers and "
            f"{config.vocab_size:,} tokens, but the weights next to it are {len(tensors):,} "
            f"tensors of at most {most_rows:,} rows. Correct it, or download the model again."
        )


def _source_of_recipe(
    options: argparse.Namespace,
    recipe_args: list[str],
    path: Path,
    tokenizer: "Tokenizer",
    is_published: bool,
) -> ModelSource:
    from shardwise.recipe import bind_recipe, find_recipe, load_recipe, make_run

    recipe = load_recipe(*find_recipe(options.recipe))
    prog = f"shardwise sample {options.run} --recipe {options.recipe}"
    run = make_run(recipe, bind_recipe(recipe, recipe_args, prog=prog))
    batch = run.data.example() if hasattr(run.data, "example") else {}
    lengths = set()
    if isinstance(batch, dict):
        lengths = {leaf.shape[1] for leaf in batch.values() if leaf.ndim == 2}
    # The model may not work on longer sequences than those it was trained on. If it has a maximum
    # length, that is used instead.
    window = lengths.pop() if len(lengths) == 1 else None
    return ModelSource(
        path, run.model, tokenizer, is_published, rules=run.rules, window=window
    )


def _find_tokenizer(
    options: argparse.Namespace, place: Path, saved: "SavedStep | None"
) -> "Tokenizer":
    from shardwise.data.tokenizers import FromFile, named_tokenizer
    from shardwise.weights.hub import tokenizer_of

    if options.tokenizer is not None:
        return named_tokenizer(options.tokenizer)
    if saved is not None:
        tokenizer = tokenizer_of(saved)
        if tokenizer is None:
            raise ConfigError(
                f"{saved.directory} does not say what its tokens mean, or the tokenizer.json that"
                " it names is neither in the run directory nor where its arguments point. Use"
                " --tokenizer FILE, bytes or characters:FILE."
            )
        return tokenizer
    file = _folder(place) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{file.parent} has no tokenizer.json. Use --tokenizer FILE or --tokenizer bytes."
        )
    return FromFile(file)


def _folder(place: Path) -> Path:
    return place if place.is_dir() else place.parent


def _load_model(source: ModelSource, options: argparse.Namespace) -> "nnx.Module":
    """Build the model with its weights, sharded as the mesh asks for."""
    import jax
    import jax.numpy as jnp
    import optax

    from shardwise.checkpoint.init_from import InitFrom
    from shardwise.mesh import make_mesh
    from shardwise.runtime import use_compilation_cache
    from shardwise.state import abstract_state
    from shardwise.weights.load import load_initial

    use_compilation_cache()
    if options.mesh is None:
        mesh = make_mesh("data=1", jax.devices()[:1])
    else:
        mesh = make_mesh(options.mesh)
    spec = abstract_state(source.factory, optax.identity(), mesh, source.rules)
    spec = spec.computing_in(options.dtype)
    init = InitFrom(source.path, average=options.average, cast=True)
    state, _ = load_initial(init, spec, seed=0)

    def cast(leaf: jax.Array) -> jax.Array:
        return (
            leaf.astype(options.dtype)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else leaf
        )

    if options.dtype is not None:
        state = replace(state, params=jax.tree.map(cast, state.params))
    return spec.module(state)


# Text


def _generate(
    source: ModelSource, prompt: bytes, options: argparse.Namespace, console: "Console"
) -> tuple[Json, int]:
    """Print the samples, the first one token by token."""
    import jax

    from shardwise.models.sampling import Sampling, stream

    tokenizer = source.tokenizer
    tokens = _encode(prompt, source)
    try:
        sampling = Sampling(
            options.temperature, options.top_k, options.top_p, tokenizer.vocab_size
        )
    except ValueError as error:
        raise ConfigError(f"shardwise sample: {error}.") from None
    with console.status(f"reading {source.path}"):
        model = _load_model(source, options)
    _check_alphabet(model, source, len(tokens))
    has_limit = getattr(getattr(model, "config", None), "max_length", None)
    new_tokens = stream(
        model,
        [tokens] * options.num,
        options.tokens,
        jax.random.key(options.seed),
        sampling,
        window=None if has_limit else source.window,
        cached=not options.no_cache,
    )
    samples = [
        _Text(tokenizer, tokens, tokenizer.end_token(None)) for _ in range(options.num)
    ]
    out = _Out(sys.stdout)
    timer = _Timer()
    code = 0
    try:
        _print_samples(samples, new_tokens, out, timer)
    except KeyboardInterrupt:
        out.write("\n")
        code = INTERRUPTED
    except ValueError as error:
        raise CheckpointError(f"{source.path}: {error}.") from error
    except BrokenPipeError:
        # The reader, for example `head`, has seen enough.
        pass
    rate = timer.tokens_per_second(options.num)
    if sys.stderr.isatty():
        speed = f", {rate:,.0f} tokens/s" if rate else ""
        latency = f"first token after {timer.latency:.1f} s"
        print(f"{timer.count * options.num} tokens, {latency}{speed}", file=sys.stderr)
    answer: Json = {
        "source": str(source.path),
        "prompt": tokenizer.decode(tokens),
        "prompt_tokens": tokens,
        "continuations": [
            {"text": sample.text, "tokens": sample.tokens, "ended": sample.ended}
            for sample in samples
        ],
        "tokens_per_second": rate,
    }
    return answer, code


def _print_samples(
    samples: list["_Text"],
    new_tokens: "Iterable[np.ndarray]",
    out: "_Out",
    timer: "_Timer",
) -> None:
    """Print the first sample while all of them are generated, then the others."""
    first = samples[0]
    _print_heading(out, 0, len(samples))
    out.write(first.shown)
    for tokens in new_tokens:
        timer.tick()
        texts = [sample.push(int(t)) for sample, t in zip(samples, tokens, strict=True)]
        out.write(texts[0])
        if all(sample.ended for sample in samples):
            break
    for sample in samples:
        sample.flush()
    out.write(first.rest)
    _end_line(out, first)
    for number, sample in enumerate(samples[1:], 1):
        _print_heading(out, number, len(samples))
        out.write(sample.shown + sample.text)
        _end_line(out, sample)


def _print_heading(out: "_Out", number: int, count: int) -> None:
    if count > 1:
        gap = "" if number == 0 else "\n"
        out.write(f"{gap}--- {number + 1} of {count}\n")


def _end_line(out: "_Out", sample: "_Text") -> None:
    if not (sample.shown + sample.text).endswith("\n"):
        out.write("\n")


class _Timer:
    """Times the tokens of a generation; each tick is one token of every sample."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.first: float | None = None
        self.last = self.started
        self.count = 0

    def tick(self) -> None:
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.count += 1

    @property
    def latency(self) -> float:
        """Seconds until the first token."""
        return (self.first or self.last) - self.started

    def tokens_per_second(self, num_samples: int) -> float | None:
        """Return the rate after the first token, whose time includes compilation."""
        elapsed = time.monotonic() - self.first if self.first is not None else 0.0
        if self.count < 2 or elapsed <= 0:
            return None
        return (self.count - 1) * num_samples / elapsed


def _check_alphabet(model: "nnx.Module", source: ModelSource, length: int) -> None:
    """Refuse a text with more or fewer characters than the model knows.

    Its characters would get the tokens of others.
    """
    from shardwise.data.tokenizers import Characters
    from shardwise.models.sampling import vocabulary_of

    if not isinstance(source.tokenizer, Characters):
        return
    known = vocabulary_of(model, source.window or length)
    if known not in (None, source.tokenizer.vocab_size):
        raise ConfigError(
            f"the text has {source.tokenizer.vocab_size} different characters, but the model knows "
            f"{known} tokens. Name the text that the model was trained on."
        )


def _encode(prompt: bytes, source: ModelSource) -> list[int]:
    """Return the tokens of the prompt.

    A published model also gets the special tokens that its tokenizer puts at the beginning.
    """
    tokenizer = source.tokenizer
    try:
        encoded = tokenizer.encode([prompt], special_tokens=source.is_published)[0]
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt is not valid UTF-8: {error}.") from None
    tokens: list[int] = encoded.tolist()
    if not tokens:
        # The end token also separates documents, so a new document can start after it.
        end = tokenizer.end_token(None)
        if end is None:
            raise ConfigError(
                "the prompt is empty, and the tokenizer has no end token to start from."
                " Give a --prompt with text."
            )
        tokens = [end]
    if source.vocab_size is not None and max(tokens) >= source.vocab_size:
        raise ConfigError(
            f"the prompt has token {max(tokens)}, but the model knows {source.vocab_size} tokens:"
            f" '{tokenizer.name}' is not the tokenizer of {source.path}."
        )
    return tokens


class _Text:
    """Tokens as text that only grows.

    Text that ends in the middle of a character is held back until the rest of the character comes.

    Attributes:
        shown: the prompt as text.
        text: the continuation so far.
        rest: the text that `flush` released.
        tokens: the tokens of the continuation.
        ended: whether the end token came.
    """

    # Tokens that are decoded again with each new one: spaces depend on the neighbors.
    CONTEXT = 8
    # Tokens after which text is released even if it ends in an incomplete character. The longest
    # character has 4 bytes.
    MAX_HELD = 4

    def __init__(self, tokenizer: "Tokenizer", prompt: list[int], end: int | None):
        self.tokenizer = tokenizer
        self.end = end
        self.shown = tokenizer.decode(prompt)
        self.text = ""
        self.rest = ""
        self.tokens: list[int] = []
        self.ended = False
        self._recent = prompt[-self.CONTEXT :]
        self._held = 0
        self._released = tokenizer.decode(self._recent)

    def push(self, token: int) -> str:
        """Add a token; return the text that can be printed now."""
        if self.ended:
            return ""
        self.tokens.append(token)
        if token == self.end:
            self.ended = True
            return ""
        self._recent.append(token)
        self._held += 1
        text = self.tokenizer.decode(self._recent)
        if text.endswith("\ufffd") and self._held < self.MAX_HELD:
            return ""
        return self._release(text)

    def flush(self) -> None:
        """Release the text that was held back, into `rest`."""
        self.rest = (
            self._release(self.tokenizer.decode(self._recent)) if self._held else ""
        )

    def _release(self, text: str) -> str:
        new = text[len(self._released) :]
        self.text += new
        self._held = 0
        self._recent = self._recent[-self.CONTEXT :]
        self._released = self.tokenizer.decode(self._recent)
        return new


class _Out:
    """Standard output without buffering. A terminal gets no control characters."""

    def __init__(self, file: TextIO):
        self.file = file
        self.is_terminal = file.isatty()

    def write(self, text: str) -> None:
        if self.is_terminal:
            text = "".join(map(_visible, text))
        self.file.write(text)
        self.file.flush()
        if is_lost(self.file):
            raise BrokenPipeError


def _visible(character: str) -> str:
    is_control = unicodedata.category(character) == "Cc" and character not in "\n\t"
    return "\ufffd" if is_control else character
