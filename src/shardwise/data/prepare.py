"""Text to a file of tokens: streaming, in bounded memory, and resumable at any moment to the same bytes.

A directory holds `tokens.bin`, `documents.bin` (where each document begins, then the number of tokens: int64), the
tokenizer, and at last `tokens.json`, without which the others count for nothing. Until then `progress.json` says how
much of the files is good.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardwise.data.files import find_file
from shardwise.data.records import open_parquet
from shardwise.data.tokenizers import FromFile, Tokenizer, open_tokenizer
from shardwise.errors import ConfigError, DataError, DirectoryInUseError
from shardwise.files.durable import sync, write_atomically

CHUNK = 2**20  # bytes of text encoded at once; a longer text file is cut at the end of a line
SAVE_SECONDS = 2.0
COMPRESSED = {".gz", ".zst", ".bz2", ".xz", ".zip", ".tar"}


@dataclass(frozen=True)
class Piece:
    """Texts to encode, whether a document ends after each, and where to go on: (input, byte or row, records before it)."""

    texts: list[bytes]
    ends: list[bool]
    place: tuple[int, int, int]
    size: int  # of what was read, in bytes of the inputs


def prepare(
    inputs: list[Path],
    out: Path,
    *,
    tokenizer: Path | None = None,
    field: str = "text",
    end_token: str | None = None,
) -> tuple[dict[str, Any], bool]:
    """Tokens of all inputs in the directory `out`, and what tokens.json says of them; and whether anything was left to do."""
    encoder = open_tokenizer(tokenizer)
    files = list_inputs(inputs)
    plan = {
        "inputs": [{"path": str(path), "size": path.stat().st_size} for path in files],
        "tokenizer": {"name": encoder.name, "sha256": encoder.sha256},
        "field": field,
        "end_token": encoder.end_token(end_token),
    }
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        if (out / "tokens.json").exists():
            done = json.loads((out / "tokens.json").read_bytes())
            _check_same(done, plan, out)
            (out / "progress.json").unlink(missing_ok=True)
            return done, False
        return _write(files, out, encoder, plan), True


def list_inputs(inputs: list[Path]) -> list[Path]:
    """Files as they are; the files below directories, sorted, without hidden ones."""
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            below = sorted(
                p
                for p in path.rglob("*")
                if p.is_file() and not any(part[0] == "." for part in p.relative_to(path).parts)
            )
            if not below:
                raise DataError(f"there are no files below '{path}'.")
            files += below
        else:
            files.append(find_file(path))
    for path in files:
        if path.suffix in COMPRESSED:
            raise DataError(
                f"'{path}' is compressed, which cannot be read from any place in it. Decompress it first."
            )
    if not files:
        raise ConfigError("there is nothing to prepare: name files or directories.")
    return files


def _check_same(saved: dict[str, Any], plan: dict[str, Any], out: Path) -> None:
    differences = [
        f"  {key}: {_short(saved.get(key))} there, {_short(plan[key])} now"
        for key in plan
        if saved.get(key) != plan[key]
    ]
    if differences:
        raise ConfigError(
            "\n".join(
                [
                    f"'{out}' was begun with other arguments:",
                    *differences,
                    "Choose another --out, or remove it.",
                ]
            )
        )


def _short(value: Any) -> str:
    if isinstance(value, list):
        total = sum(item["size"] for item in value)
        return f"{len(value)} files of {total} bytes ({', '.join(item['path'] for item in value[:3])}{', ...' if len(value) > 3 else ''})"
    return json.dumps(value)


def _write(
    files: list[Path], out: Path, encoder: Tokenizer, plan: dict[str, Any]
) -> dict[str, Any]:
    dtype = np.dtype(
        "uint8"
        if encoder.vocab_size <= 2**8
        else "uint16"
        if encoder.vocab_size <= 2**16
        else "uint32"
    )
    state = _read_progress(out, plan)
    if isinstance(encoder, FromFile) and not state["tokens"]:
        (out / "tokenizer.json").write_bytes(encoder.content)
        sync(out / "tokenizer.json")
    total = sum(item["size"] for item in plan["inputs"])
    sizes = state["tokens"] * dtype.itemsize, state["offsets"] * 8
    with (
        _opened(out / "tokens.bin", sizes[0]) as tokens,
        _opened(out / "documents.bin", sizes[1]) as offsets,
    ):
        if not state["offsets"]:
            offsets.write(np.zeros(1, "<i8").tobytes())
            state["offsets"] = 1
            _save_progress(out, plan, state, tokens, offsets)
        saved = time.monotonic()
        with _progress(total, state["read"]) as show:
            for piece in _pieces(files, state["place"], plan):
                _append(piece, encoder, plan["end_token"], dtype, tokens, offsets, state)
                show(state["read"], state["tokens"])
                if time.monotonic() - saved > SAVE_SECONDS:
                    _save_progress(out, plan, state, tokens, offsets)
                    saved = time.monotonic()
        if not state["tokens"]:
            raise DataError(
                f"there is no text in the {len(files)} inputs ({total} bytes), beginning with '{files[0]}'."
            )
        _save_progress(out, plan, state, tokens, offsets)
    info = {
        "format": "shardwise tokens 1",
        "dtype": str(dtype),
        "tokens": state["tokens"],
        "documents": state["offsets"] - 1,
        "document_offsets": "documents.bin",
        "vocab_size": encoder.vocab_size,
        **plan,
    }
    write_atomically(out / "tokens.json", json.dumps(info, indent=2) + "\n")
    (out / "progress.json").unlink()
    return info


def _append(
    piece: Piece,
    encoder: Tokenizer,
    end: int | None,
    dtype: np.dtype[Any],
    tokens: BinaryIO,
    offsets: BinaryIO,
    state: dict[str, Any],
) -> None:
    for encoded, ends in zip(encoder.encode(piece.texts), piece.ends, strict=True):
        tokens.write(encoded.astype(dtype).tobytes())
        state["tokens"] += len(encoded)
        if ends:
            if end is not None:
                tokens.write(np.array([end], dtype).tobytes())
                state["tokens"] += 1
            offsets.write(np.array([state["tokens"]], "<i8").tobytes())
            state["offsets"] += 1
    state["place"], state["read"] = list(piece.place), state["read"] + piece.size


def _read_progress(out: Path, plan: dict[str, Any]) -> dict[str, Any]:
    path = out / "progress.json"
    if not path.exists():
        if (
            (out / "tokens.bin").exists()
            and (out / "tokens.bin").stat().st_size
            and not (out / "documents.bin").exists()
        ):
            raise ConfigError(
                f"'{out / 'tokens.bin'}' is there, and not from an unfinished prepare. Choose another --out."
            )
        return {"tokens": 0, "offsets": 0, "place": [0, 0, 0], "read": 0}
    saved = json.loads(path.read_bytes())
    _check_same(saved["plan"], plan, out)
    return saved["state"]


def _save_progress(
    out: Path, plan: dict[str, Any], state: dict[str, Any], *files: BinaryIO
) -> None:
    """What the files hold is on the disk before it is said that they hold it."""
    for file in files:
        file.flush()
        os.fsync(file.fileno())
    write_atomically(out / "progress.json", json.dumps({"plan": plan, "state": state}))


@contextmanager
def _opened(path: Path, size: int) -> Iterator[BinaryIO]:
    """The file, cut to the size up to which it is good, to be written on from there."""
    with path.open("r+b" if path.exists() else "w+b") as file:
        if os.fstat(file.fileno()).st_size < size:
            raise DataError(
                f"'{path}' has fewer than the {size} bytes that were written. Remove '{path.parent}' and prepare again."
            )
        file.truncate(size)
        file.seek(size)
        yield file


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One prepare at a time for a directory; the lock ends with the process."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUseError(
                f"another prepare is writing to '{out}'. Wait for it, or choose another --out."
            ) from None
        yield
    finally:
        os.close(descriptor)


def _pieces(files: list[Path], place: list[int], plan: dict[str, Any]) -> Iterator[Piece]:
    first, at, record = place
    for number in range(first, len(files)):
        path, size = files[number], plan["inputs"][number]["size"]
        readers = {".jsonl": _json_lines, ".parquet": _parquet}
        yield from readers.get(path.suffix, _text)(path, number, at, record, size, plan)
        at = record = 0


def _text(
    path: Path, number: int, at: int, record: int, size: int, plan: dict[str, Any]
) -> Iterator[Piece]:
    """A text file is one document. It is cut into pieces at line ends, or between characters in a line that is too long."""
    is_bytes = plan["tokenizer"]["name"] == "bytes" and plan["tokenizer"]["sha256"] is None
    with path.open("rb") as file:
        while at < size:
            file.seek(at)
            text = file.read(min(CHUNK, size - at))
            if not text:
                raise DataError(
                    f"'{path}' had {size} bytes at the start, and now ends at byte {at}."
                )
            if at + len(text) < size:
                text = text[: text.rfind(b"\n") + 1] or _whole_characters(text)
            if not is_bytes:
                _check_utf8(text, f"'{path}'", at)
            at += len(text)
            ended = at >= size
            yield Piece(
                [text], [ended], (number + 1, 0, 0) if ended else (number, at, 0), len(text)
            )


def _whole_characters(text: bytes) -> bytes:
    """Without the bytes of a character that is not all there."""
    for cut in range(1, 5):
        if text[-cut] & 0xC0 != 0x80:  # where the last character begins
            length = (
                1
                if text[-cut] < 0x80
                else 2
                if text[-cut] < 0xE0
                else 3
                if text[-cut] < 0xF0
                else 4
            )
            return text if length <= cut else text[:-cut]
    return text


def _check_utf8(text: bytes, name: str, at: int) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not UTF-8 at byte {at + error.start}: {error.reason}."
        ) from None


def _json_lines(
    path: Path, number: int, at: int, record: int, size: int, plan: dict[str, Any]
) -> Iterator[Piece]:
    with path.open("rb") as file:
        file.seek(at)
        while at < size:
            texts, start = [], at
            for line in iter(file.readline, b""):
                at += len(line)
                if line.strip():
                    texts.append(_field(line, plan["field"], f"'{path}', record {record}"))
                    record += 1
                if at - start >= CHUNK:
                    break
            if at == start:
                raise DataError(
                    f"'{path}' had {size} bytes at the start, and now ends at byte {at}."
                )
            yield Piece(texts, [True] * len(texts), (number, at, record), at - start)


def _field(line: bytes, field: str, name: str) -> bytes:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{name} is not JSON: {error}") from None
    return _checked_text(value.get(field) if isinstance(value, dict) else None, field, name, value)


def _checked_text(value: Any, field: str, name: str, record: Any) -> bytes:
    if not isinstance(value, str):
        found = (
            f"it has {', '.join(record)}"
            if isinstance(record, dict)
            else f"it is a {type(record).__name__}"
        )
        raise DataError(
            f"{name} has no text in field '{field}'; {found}. Say which it is with --field."
        )
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} has half of a character in field '{field}': {error.reason}."
        ) from None


def _parquet(
    path: Path, number: int, at: int, record: int, size: int, plan: dict[str, Any]
) -> Iterator[Piece]:
    file, field = open_parquet(path), plan["field"]
    if field not in file.schema_arrow.names:
        raise DataError(
            f"'{path}' has no column '{field}'; it has {', '.join(file.schema_arrow.names)}. Say which it is with --field."
        )
    rows, first = file.metadata.num_rows, 0
    for group in range(file.metadata.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        first, start = first + count, first
        if first <= at:
            continue
        try:
            batches = file.iter_batches(
                batch_size=256, row_groups=[group], columns=[field], use_threads=False
            )
            for batch in batches:
                values = batch.column(0).to_pylist()
                skipped, start = max(at - start, 0), start + len(values)
                if skipped >= len(values):
                    continue
                names = (f"'{path}', record {at + i}" for i in range(len(values)))
                texts = [
                    _checked_text(v, field, name, type(v).__name__)
                    for v, name in zip(values[skipped:], names, strict=False)
                ]
                read = size * start // rows - size * at // rows
                at = start
                yield Piece(texts, [True] * len(texts), (number, at, 0), read)
        except OSError as error:
            raise DataError(
                f"'{path}', record {at}: row group {group} cannot be read: {error}"
            ) from None


@contextmanager
def _progress(total: int, done: int) -> Iterator[Any]:
    """A bar in a terminal, else a line now and then; gives the function to call with (bytes read, tokens)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        last = time.monotonic()

        def line(read: int, tokens: int) -> None:
            nonlocal last
            if time.monotonic() - last > 10:
                last = time.monotonic()
                console.print(
                    f"{read / max(total, 1):.0%}: {read:,} of {total:,} bytes, {tokens:,} tokens",
                    highlight=False,
                )

        yield line
        return
    columns = (
        TextColumn("preparing"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total, completed=done, tokens="0")
        yield lambda read, tokens: progress.update(task, completed=read, tokens=f"{tokens:,}")
