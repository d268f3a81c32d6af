"""`shardwise data prepare` tokenizes text; `data show` describes tokens, or the batch of a step."""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from rich.console import Console

from shardwise.cli.options import command_parser
from shardwise.data.batches import as_batches
from shardwise.data.files import SAMPLE_BLOCKS, TokenFile, open_tokens
from shardwise.data.tokenizers import Bytes, FromFile, Tokenizer
from shardwise.errors import ConfigError, DataError
from shardwise.text import Json

# Tokens that are counted at most; in a larger file, in blocks spread evenly over it.
MAX_COUNTED = 2**26
COUNT_BLOCK = 2**22
# A larger token number means that the file was read with the wrong dtype.
MAX_VOCABULARY = 2**24
# Tokens shown of an example or a document.
MAX_SHOWN = 400
# Tokens shown of a file without documents, from each position.
EXCERPT = 100
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

Print = Callable[[str], None]


def main(args: list[str], shared: argparse.Namespace) -> tuple[Json, int]:
    """Run `shardwise data`; return what `--json` writes, and the exit code."""
    parser = command_parser("data")
    if not args:
        print(parser.format_help(), end="")
        return {}, 2
    # `show` takes a recipe, whose arguments this parser does not know.
    options, recipe_args = parser.parse_known_args(args)
    if options.command == "prepare":
        if recipe_args:
            raise ConfigError(
                f"shardwise data prepare: unknown argument {' '.join(recipe_args)}."
            )
        return _prepare(options), 0
    return _show(options, recipe_args, shared), 0


def _prepare(options: argparse.Namespace) -> Json:
    from shardwise.data.prepare import prepare

    info, has_worked = prepare(
        options.inputs,
        options.out,
        tokenizer=options.tokenizer,
        field=options.field,
        end_token=options.end_token,
    )
    state = "prepared" if has_worked else "nothing to do, already prepared:"
    size = f"{info['tokens']:,} tokens ({info['dtype']}) in {info['documents']:,} documents"
    print(f"{state} {size}: {options.out}", file=sys.stderr)
    if has_worked:
        out = shlex.quote(str(options.out))
        print(
            f"next:\n  shardwise data show {out}\n"
            f"  shardwise train recipes/tokens_gpt.py --data {out}",
            file=sys.stderr,
        )
    return {"out": str(options.out), **info}


def _show(
    options: argparse.Namespace, recipe_args: list[str], shared: argparse.Namespace
) -> Json:
    if options.step < 1 or options.rows < 0:
        raise ConfigError(
            f"--step {options.step} --rows {options.rows}: steps count from 1, as in"
            " metrics.jsonl, and --rows must not be negative."
        )
    is_recipe = options.target.partition(":")[0].endswith(".py")
    if is_recipe:
        return show_batch(
            options.target, recipe_args, options.step, options.rows, shared.cpu_devices
        )
    if recipe_args:
        raise ConfigError(
            f"unknown argument {' '.join(recipe_args)} for a file of tokens; there are --rows and"
            " --dtype."
        )
    return show_tokens(Path(options.target), options.rows, options.dtype)


def _printer() -> Print:
    """Return a print function that does not interpret text from files as markup."""
    return Console(soft_wrap=True, highlight=False, markup=False).print


# A file of tokens


def show_tokens(path: Path, num_examples: int, dtype: str | None = None) -> Json:
    """Print and return what a file of tokens contains.

    Args:
        path: a prepared directory, or a .bin or .npy file.
        num_examples: documents or excerpts to show.
        dtype: dtype of a .bin file without a .json file.
    """
    file = open_tokens(path, dtype)
    tokenizer = tokenizer_of(file)
    say = _printer()
    counts, num_counted = _count_tokens(file)
    largest = int(np.flatnonzero(counts)[-1])
    answer: Json = {
        "path": str(file.path),
        "tokens": len(file),
        "dtype": str(file.dtype),
        "largest": largest,
    }
    num_distinct = int((counts > 0).sum())
    say(
        f"{file.path}: {len(file):,} tokens ({file.dtype}), {num_distinct:,} distinct,"
        f" the largest is {largest}"
    )
    if num_counted < len(file):
        say(f"counted in {num_counted:,} tokens spread over the file")
    if tokenizer is not None:
        answer["tokenizer"] = {"name": tokenizer.name, "sha256": tokenizer.sha256}
        digest = f", sha256 {tokenizer.sha256[:16]}..." if tokenizer.sha256 else ""
        say(f"tokenizer: {tokenizer.name}{digest}")
    answer["most_frequent"] = _most_frequent(counts, num_counted, tokenizer)
    for entry in answer["most_frequent"]:
        text = f"  {entry['text']!r}" if tokenizer else ""
        say(f"  {entry['share']:6.2%}  token {entry['token']}{text}")
    if "document_offsets" in file.info:
        answer |= _document_lengths(file, say)
        excerpts = _document_excerpts(file, num_examples)
    else:
        excerpts = _plain_excerpts(file, num_examples)
    answer["examples"] = []
    for name, tokens in excerpts.items():
        text = _decode(tokenizer, tokens[:MAX_SHOWN])
        answer["examples"].append({"name": name, "tokens": len(tokens), "text": text})
        say(f"\n{name}, {len(tokens):,} tokens:\n{text}")
    return answer


def _most_frequent(
    counts: np.ndarray, total: int, tokenizer: Tokenizer | None
) -> list[Json]:
    top = np.argsort(-counts, kind="stable")[:10]
    return [
        {
            "token": int(token),
            "share": counts[token] / total,
            "text": _decode(tokenizer, np.array([token])),
        }
        for token in top
        if counts[token]
    ]


def _document_lengths(file: TokenFile, say: Print) -> Json:
    lengths = np.diff(file.documents)
    quantiles = {f"{q:.0%}": int(np.quantile(lengths, q)) for q in QUANTILES}
    shown = ", ".join(f"{name} {value:,}" for name, value in quantiles.items())
    say(f"{len(lengths):,} documents; tokens per document: {shown}")
    return {"documents": len(lengths), "document_tokens": quantiles}


def _document_excerpts(file: TokenFile, count: int) -> dict[str, np.ndarray]:
    num_documents = len(file.documents) - 1
    chosen = np.unique(np.linspace(0, num_documents - 1, count).astype(int)).tolist()
    return {
        f"document {n}": file[file.documents[n] : file.documents[n + 1]] for n in chosen
    }


def _plain_excerpts(file: TokenFile, count: int) -> dict[str, np.ndarray]:
    last = max(len(file) - EXCERPT, 0)
    starts = np.unique(np.linspace(0, last, count).astype(int)).tolist()
    return {f"tokens from {start}": file[start : start + EXCERPT] for start in starts}


def _count_tokens(file: TokenFile) -> tuple[np.ndarray, int]:
    """Return how often each token occurs, and the number of tokens that were counted."""
    array = file.array()
    if len(array) <= MAX_COUNTED:
        size = COUNT_BLOCK
        starts = range(0, len(array), size)
    else:
        size = MAX_COUNTED // SAMPLE_BLOCKS
        starts = range(0, len(array) - size, (len(array) - size) // SAMPLE_BLOCKS + 1)
    counts = np.zeros(0, np.int64)
    num_counted = 0
    for start in starts:
        block = array[start : start + size]
        largest = int(block.max())
        if largest >= MAX_VOCABULARY:
            raise DataError(
                f"'{file.path}' has token {largest} near position {start}, which is larger than any"
                f" vocabulary. Is its dtype really {file.dtype}? Set it with --dtype."
            )
        block_counts = np.bincount(block, minlength=len(counts))
        block_counts[: len(counts)] += counts
        counts = block_counts
        num_counted += len(block)
    return counts, num_counted


# The batch of a step


def show_batch(
    target: str,
    args: list[str],
    step: int,
    num_examples: int,
    cpu_devices: int | None = None,
) -> Json:
    """Print and return what the batch of a step contains.

    Args:
        target: a recipe, `file.py` or `file.py:function`.
        args: its arguments.
        step: which step, counted from 1 as in metrics.jsonl.
        num_examples: examples to show.
        cpu_devices: number of virtual CPU devices; None leaves the devices alone.
    """
    from shardwise.mesh import use_cpu_devices
    from shardwise.recipe import bind_recipe, find_recipe, load_recipe, make_run

    path, function = find_recipe(target)
    if cpu_devices is not None:
        use_cpu_devices(cpu_devices)
    recipe = load_recipe(path, function)
    run = make_run(
        recipe, bind_recipe(recipe, args, prog=f"shardwise data show {target}")
    )
    batches = as_batches(run.data)
    batch = batches(step - 1)
    if not isinstance(batch, dict):
        raise DataError(
            f"the batch is a {type(batch).__name__}; `shardwise data show` needs a dictionary of"
            " arrays."
        )
    arrays = {name: np.asarray(array) for name, array in batch.items()}
    say = _printer()
    say(f"the batch of step {step} of {run.steps}: batches({step - 1})")
    answer: Json = {"step": step, "arrays": {}, "rows": []}
    for name, array in arrays.items():
        statistics = answer["arrays"][name] = _array_statistics(array)
        say(
            f"  {name}: "
            + ", ".join(f"{key} {_show_value(v)}" for key, v in statistics.items())
        )
    tokenizer = _tokenizer_in(getattr(batches, "source", None))
    # Numbers that all examples share are shown above.
    columns = {name: array for name, array in arrays.items() if array.ndim}
    batch_size = len(next(iter(columns.values())))
    for index in range(min(num_examples, batch_size)):
        example = _show_example(
            {name: column[index] for name, column in columns.items()}, tokenizer
        )
        answer["rows"].append(example)
        say(f"\nexample {index}")
        for segment in example.get("segments", []):
            say(f"  {segment['name']}, {segment['tokens']} tokens:\n{segment['text']}")
        for name, text in example.get("values", {}).items():
            say(f"  {name}: {text}")
    return answer


def _array_statistics(array: np.ndarray) -> Json:
    statistics: Json = {"shape": list(array.shape), "dtype": str(array.dtype)}
    if array.size and array.dtype.kind in "iufb":
        values = array.astype(np.float64)
        statistics["min"] = values.min()
        statistics["mean"] = values.mean()
        statistics["max"] = values.max()
        statistics["finite"] = bool(np.isfinite(values).all())
    return statistics


def _show_value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _show_example(
    example: Mapping[str, np.ndarray], tokenizer: Tokenizer | None
) -> Json:
    """Return the documents of an example as text if possible, otherwise its values."""
    if tokenizer is None or "inputs" not in example:
        values = {
            name: np.array2string(array, threshold=20, edgeitems=5)
            for name, array in example.items()
        }
        return {"values": values}
    inputs = example["inputs"]
    segment_ids = example.get("segment_ids")
    starts = [0]
    if segment_ids is not None:
        starts += (np.flatnonzero(np.diff(segment_ids)) + 1).tolist()
    ends = [*starts[1:], len(inputs)]
    segments = [
        {
            "name": "text" if segment_ids is None else f"document at {start}",
            "start": start,
            "tokens": end - start,
            "text": _decode(tokenizer, inputs[start:end][:MAX_SHOWN]),
        }
        for start, end in zip(starts, ends, strict=True)
    ]
    return {"segments": segments}


# Tokenizers


def tokenizer_of(file: TokenFile) -> Tokenizer | None:
    """Return the tokenizer that a prepared file was made with; bytes need none.

    Raises:
        DataError: if the tokenizer.json next to the file is a different one.
    """
    known = file.info.get("tokenizer")
    if known is None:
        return Bytes() if file.dtype == np.uint8 else None
    if known["sha256"] is None:
        return Bytes()
    path = file.path.with_name("tokenizer.json")
    tokenizer = FromFile(path)
    if tokenizer.sha256 != known["sha256"]:
        raise DataError(
            f"'{path}' is not the tokenizer that '{file.path}' was prepared with."
        )
    return tokenizer


def _tokenizer_in(source: object) -> Tokenizer | None:
    """Return the tokenizer of the first token file or byte array in a source, also if nested."""
    tokens = getattr(source, "tokens", None)
    if isinstance(tokens, TokenFile):
        return tokenizer_of(tokens)
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint8:
        return Bytes()
    inner = [getattr(source, "source", None)]
    inner += [part.source for part in getattr(source, "_parts", ())]
    for nested in inner:
        tokenizer = None if nested is None else _tokenizer_in(nested)
        if tokenizer is not None:
            return tokenizer
    return None


def _decode(tokenizer: Tokenizer | None, tokens: np.ndarray) -> str:
    if tokenizer is None:
        return " ".join(map(str, np.asarray(tokens)[:40]))
    return str(tokenizer.decode(tokens))
