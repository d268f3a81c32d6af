"""What is in the data: statistics and text, of prepared tokens or of the batch of a step."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from shardwise.data.batches import as_batches
from shardwise.data.files import SAMPLE_BLOCKS, TokenFile, open_tokens
from shardwise.data.tokenizers import Bytes, FromFile, Tokenizer
from shardwise.errors import DataError

COUNTED = 2**26  # tokens that are counted at most, in blocks spread over the file
TEXT = 400  # characters shown of a row or document


def show_tokens(path: Path, rows: int, dtype: str | None = None) -> dict[str, Any]:
    """Prints and returns what a file of tokens holds."""
    file = open_tokens(path, dtype)
    tokenizer = tokenizer_of(file)
    counts, counted = _count_tokens(file)
    common = np.argsort(-counts, kind="stable")[:10]
    largest = int(np.flatnonzero(counts)[-1])
    answer: dict[str, Any] = {
        "path": str(file.path),
        "tokens": len(file),
        "dtype": str(file.dtype),
        "largest": largest,
    }
    say = Console(soft_wrap=True, highlight=False, markup=False).print
    say(
        f"{file.path}: {len(file):,} tokens ({file.dtype}), {int((counts > 0).sum()):,} different ones, the largest {largest}"
    )
    if counted < len(file):
        say(f"counted in {counted:,} tokens spread over the file")
    if tokenizer is not None:
        answer["tokenizer"] = {"name": tokenizer.name, "sha256": tokenizer.sha256}
        say(
            f"tokenizer: {tokenizer.name}"
            + (f", sha256 {tokenizer.sha256[:16]}..." if tokenizer.sha256 else "")
        )
    answer["most_frequent"] = [
        {
            "token": int(token),
            "share": counts[token] / counted,
            "text": _text(tokenizer, np.array([token])),
        }
        for token in common
        if counts[token]
    ]
    for entry in answer["most_frequent"]:
        say(
            f"  {entry['share']:6.2%}  token {entry['token']}"
            + (f"  {entry['text']!r}" if tokenizer else "")
        )
    if "document_offsets" in file.info:
        lengths = np.diff(file.documents)
        quantiles = {
            f"{q:.0%}": int(np.quantile(lengths, q))
            for q in (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
        }
        answer |= {"documents": len(lengths), "document_tokens": quantiles}
        say(
            f"{len(lengths):,} documents; tokens in a document: "
            + ", ".join(f"{name} {value:,}" for name, value in quantiles.items())
        )
        chosen = np.unique(np.linspace(0, len(lengths) - 1, rows).astype(int)).tolist()
        spans = {f"document {n}": file[file.documents[n] : file.documents[n + 1]] for n in chosen}
    else:
        starts = np.unique(np.linspace(0, max(len(file) - 100, 0), rows).astype(int)).tolist()
        spans = {f"tokens from {start} on": file[start : start + 100] for start in starts}
    answer["examples"] = []
    for name, tokens in spans.items():
        text = _text(tokenizer, tokens[:TEXT])
        answer["examples"].append({"name": name, "tokens": len(tokens), "text": text})
        say(f"\n{name}, {len(tokens):,} tokens:\n{text}")
    return answer


def show_batch(
    target: str, args: list[str], step: int, rows: int, cpu_devices: int | None = None
) -> dict[str, Any]:
    """Prints and returns what the batch that makes `step` holds, in the run that a recipe gives."""
    from shardwise.recipe import bind_recipe, find_recipe, load_recipe, make_run

    path, function = find_recipe(target)
    if cpu_devices is not None:
        from shardwise.mesh import use_cpu_devices

        use_cpu_devices(cpu_devices)
    recipe = load_recipe(path, function)
    run = make_run(recipe, bind_recipe(recipe, args, prog=f"shardwise data show {target}"))
    batches = as_batches(run.data)
    batch = batches(step - 1)
    if not isinstance(batch, dict):
        raise DataError(
            f"the batch is a {type(batch).__name__}; show can tell of dictionaries of arrays."
        )
    say = Console(soft_wrap=True, highlight=False, markup=False).print
    say(f"the batch that makes step {step} of {run.steps}: batches({step - 1})")
    answer: dict[str, Any] = {"step": step, "arrays": {}, "rows": []}
    for name, array in batch.items():
        array = np.asarray(array)
        entry: dict[str, Any] = {"shape": list(array.shape), "dtype": str(array.dtype)}
        if array.size and array.dtype.kind in "iufb":
            numbers = array.astype(np.float64)
            entry |= {
                "min": numbers.min(),
                "mean": numbers.mean(),
                "max": numbers.max(),
                "finite": bool(np.isfinite(numbers).all()),
            }
        answer["arrays"][name] = entry
        say(
            f"  {name}: "
            + ", ".join(
                f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in entry.items()
            )
        )
    tokenizer = _tokenizer_in(getattr(batches, "source", None))
    for row in range(min(rows, len(next(iter(batch.values()))))):
        shown = _row({name: np.asarray(array)[row] for name, array in batch.items()}, tokenizer)
        answer["rows"].append(shown)
        say(f"\nrow {row}")
        for segment in shown.get("segments", []):
            say(f"  {segment['name']}, {segment['tokens']} tokens:\n{segment['text']}")
        for name, text in shown.get("values", {}).items():
            say(f"  {name}: {text}")
    return answer


def _row(row: dict[str, np.ndarray], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The documents in a row as text, if it has inputs and the tokenizer is known; else its values."""
    if tokenizer is None or "inputs" not in row:
        return {
            "values": {
                name: np.array2string(array, threshold=20, edgeitems=5)
                for name, array in row.items()
            }
        }
    inputs, ids = row["inputs"], row.get("segment_ids")
    starts = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist()] if ids is not None else [0]
    ends = [*starts[1:], len(inputs)]
    names = [f"document at {start}" if ids is not None else "text" for start in starts]
    segments = [
        {
            "name": name,
            "start": start,
            "tokens": end - start,
            "text": _text(tokenizer, inputs[start:end][:TEXT]),
        }
        for name, start, end in zip(names, starts, ends, strict=True)
    ]
    return {"segments": segments}


def tokenizer_of(file: TokenFile) -> Tokenizer | None:
    """The tokenizer that a prepared file was made with; bytes are their own."""
    known = file.info.get("tokenizer")
    if known is None:
        return Bytes() if file.dtype == np.uint8 else None
    if known["sha256"] is None:
        return Bytes()
    tokenizer = FromFile(file.path.with_name("tokenizer.json"))
    if tokenizer.sha256 != known["sha256"]:
        raise DataError(
            f"'{file.path.with_name('tokenizer.json')}' is not the tokenizer that '{file.path}' was made with."
        )
    return tokenizer


def _tokenizer_in(source: Any) -> Tokenizer | None:
    """Of the first token file, or array of bytes, in a source and the sources that it is made of."""
    inner = [
        getattr(source, "source", None),
        *(part for _, part, _ in getattr(source, "_parts", ())),
    ]
    tokens = getattr(source, "tokens", None)
    if isinstance(tokens, TokenFile):
        return tokenizer_of(tokens)
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint8:
        return Bytes()
    return next(
        (
            found
            for part in inner
            if part is not None and (found := _tokenizer_in(part)) is not None
        ),
        None,
    )


def _text(tokenizer: Tokenizer | None, tokens: np.ndarray) -> str:
    return (
        tokenizer.decode(tokens)
        if tokenizer is not None
        else " ".join(map(str, np.asarray(tokens)[:40]))
    )


def _count_tokens(file: TokenFile) -> tuple[np.ndarray, int]:
    """How often each token occurs, in all of the file or in evenly spaced blocks of it, and in how many tokens that is."""
    array = file.array()
    if len(array) <= COUNTED:
        starts, size = range(0, len(array), 2**22), 2**22
    else:
        size = COUNTED // SAMPLE_BLOCKS
        starts = range(0, len(array) - size, (len(array) - size) // SAMPLE_BLOCKS + 1)
    counts, counted = np.zeros(0, np.int64), 0
    for start in starts:
        block = array[start : start + size]
        if int(block.max()) >= 2**24:
            raise DataError(
                f"'{file.path}' has token {int(block.max())} near number {start}; that is no vocabulary. Is {file.dtype} its dtype?"
            )
        part = np.bincount(block, minlength=len(counts))
        part[: len(counts)] += counts
        counts, counted = part, counted + len(block)
    return counts, counted
