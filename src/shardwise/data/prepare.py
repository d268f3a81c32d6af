"""Text to a file of tokens: streaming, in bounded memory, resumable at any moment.

However often it is interrupted, the result is the same byte for byte. A prepared directory holds

- `tokens.bin`, the tokens;
- `documents.bin`, the offset of each document and then the number of tokens, int64;
- `tokenizer.json`, if there is one;
- `tokens.json`, the description, written last. Without it the other files are incomplete.

Until then `progress.json` says how much of the files is valid.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np

from shardwise.data.files import find_file
from shardwise.data.records import open_parquet
from shardwise.data.tokenizers import FromFile, Tokenizer, open_tokenizer
from shardwise.errors import ConfigError, DataError, DirectoryInUseError
from shardwise.files.durable import sync, write_atomically
from shardwise.text import Json

# Bytes of text that are encoded at once. A longer text file is divided at the end of a line.
CHUNK = 2**20
SAVE_SECONDS = 2.0
# Seconds between two lines of progress without a terminal.
LINE_SECONDS = 10.0
PARQUET_ROWS = 256
COMPRESSED = {".gz", ".zst", ".bz2", ".xz", ".zip", ".tar"}

# Called with the bytes read and the tokens written.
ShowProgress: TypeAlias = Callable[[int, int], object]


@dataclass(frozen=True)
class Position:
    """Where to continue reading.

    Attributes:
        file: number of the input file.
        offset: byte of a text or JSON file, row of a Parquet file.
        record: number of JSON records before it in the file.
    """

    file: int = 0
    offset: int = 0
    record: int = 0


@dataclass(frozen=True)
class Chunk:
    """Text that was read.

    Attributes:
        texts: the texts to encode.
        ends: whether a document ends after each text.
        position: where to continue.
        size: how much of the inputs was read, in bytes.
    """

    texts: list[bytes]
    ends: list[bool]
    position: Position
    size: int


@dataclass
class Progress:
    """How much has been written; `progress.json` keeps it.

    Attributes:
        tokens: tokens in `tokens.bin`.
        offsets: offsets in `documents.bin`.
        position: where to continue reading.
        read: bytes of the inputs that were read.
    """

    tokens: int = 0
    offsets: int = 0
    position: Position = Position()
    read: int = 0

    @classmethod
    def from_json(cls, saved: Json) -> "Progress":
        return cls(
            saved["tokens"], saved["offsets"], Position(*saved["place"]), saved["read"]
        )

    def as_json(self) -> Json:
        return {
            "tokens": self.tokens,
            "offsets": self.offsets,
            "place": list(asdict(self.position).values()),
            "read": self.read,
        }


@dataclass(frozen=True)
class Input:
    """One input file, and its size when the work began."""

    number: int
    path: Path
    size: int


def prepare(
    inputs: list[Path],
    out: Path,
    *,
    tokenizer: Path | None = None,
    field: str = "text",
    end_token: str | None = None,
) -> tuple[Json, bool]:
    """Write the tokens of all inputs to a directory, or resume doing so.

    Args:
        inputs: text files, .jsonl and .parquet files, or directories of them.
        out: the directory.
        tokenizer: a tokenizer.json; None makes every byte a token.
        field: the field with the text in .jsonl and .parquet files.
        end_token: the token after every document; None for that of the tokenizer, "" for none.

    Returns:
        The content of `tokens.json`, and whether anything was left to do.

    Raises:
        ConfigError: if the directory was started with other arguments.
        DataError: if an input cannot be read.
        DirectoryInUseError: if another process is writing to the directory.
    """
    encoder = open_tokenizer(tokenizer)
    files = list_inputs(inputs)
    arguments = {
        "inputs": [{"path": str(path), "size": path.stat().st_size} for path in files],
        "tokenizer": {"name": encoder.name, "sha256": encoder.sha256},
        "field": field,
        "end_token": encoder.end_token(end_token),
    }
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        description = out / "tokens.json"
        if not description.exists():
            return _write(files, out, encoder, arguments), True
        info: Json = json.loads(description.read_bytes())
        _check_same(info, arguments, out)
        (out / "progress.json").unlink(missing_ok=True)
        return info, False


def list_inputs(inputs: list[Path]) -> list[Path]:
    """Return the input files: files as given, directories as their files, sorted, not hidden ones.

    Raises:
        ConfigError: if there are none.
        DataError: if one is missing or compressed.
    """
    files: list[Path] = []
    for path in inputs:
        if not path.is_dir():
            files.append(find_file(path))
            continue
        inside = [inner for inner in path.rglob("*") if inner.is_file()]
        visible = [inner for inner in inside if not _is_hidden(inner.relative_to(path))]
        if not visible:
            raise DataError(f"there are no files below '{path}'.")
        files += sorted(visible)
    for path in files:
        if path.suffix in COMPRESSED:
            raise DataError(
                f"'{path}' is compressed, so reading could not resume inside it. Decompress it"
                " first."
            )
    if not files:
        raise ConfigError("there is nothing to prepare: name files or directories.")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _check_same(saved: Json, arguments: Json, out: Path) -> None:
    different = [
        f"  {name}: {_show(saved.get(name))} there, {_show(value)} now"
        for name, value in arguments.items()
        if saved.get(name) != value
    ]
    if different:
        lines = "\n".join(different)
        raise ConfigError(
            f"'{out}' was started with other arguments:\n{lines}\n"
            "Choose another --out, or remove it."
        )


def _show(value: object) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    total = sum(item["size"] for item in value)
    names = ", ".join(item["path"] for item in value[:3])
    more = ", ..." if len(value) > 3 else ""
    return f"{len(value)} files of {total} bytes ({names}{more})"


# Writing


def _write(files: list[Path], out: Path, encoder: Tokenizer, arguments: Json) -> Json:
    dtype = _token_dtype(encoder.vocab_size)
    progress = _read_progress(out, arguments)
    if isinstance(encoder, FromFile) and not progress.tokens:
        (out / "tokenizer.json").write_bytes(encoder.content)
        sync(out / "tokenizer.json")
    inputs = [
        Input(number, path, arguments["inputs"][number]["size"])
        for number, path in enumerate(files)
    ]
    total = sum(item.size for item in inputs)
    with (
        _open_at(out / "tokens.bin", progress.tokens * dtype.itemsize) as tokens,
        _open_at(out / "documents.bin", progress.offsets * 8) as offsets,
    ):

        def save() -> None:
            # What the files hold is on the disk before progress.json says that they hold it.
            for file in (tokens, offsets):
                file.flush()
                os.fsync(file.fileno())
            content = {"plan": arguments, "state": progress.as_json()}
            write_atomically(out / "progress.json", json.dumps(content))

        if not progress.offsets:
            offsets.write(np.zeros(1, "<i8").tobytes())
            progress.offsets = 1
            save()
        last_save = time.monotonic()
        with _progress_bar(total, progress.read) as show:
            for chunk in _chunks(inputs, progress.position, arguments):
                _append(
                    chunk,
                    encoder,
                    arguments["end_token"],
                    dtype,
                    tokens,
                    offsets,
                    progress,
                )
                show(progress.read, progress.tokens)
                if time.monotonic() - last_save > SAVE_SECONDS:
                    save()
                    last_save = time.monotonic()
        if not progress.tokens:
            raise DataError(
                f"there is no text in the {len(files)} inputs ({total} bytes); the first is"
                f" '{files[0]}'."
            )
        save()
    info = {
        "format": "shardwise tokens 1",
        "dtype": str(dtype),
        "tokens": progress.tokens,
        "documents": progress.offsets - 1,
        "document_offsets": "documents.bin",
        "vocab_size": encoder.vocab_size,
        **arguments,
    }
    write_atomically(out / "tokens.json", json.dumps(info, indent=2) + "\n")
    (out / "progress.json").unlink()
    return info


def _token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype that holds every token."""
    return next(
        np.dtype(f"uint{bits}") for bits in (8, 16, 32) if vocab_size <= 2**bits
    )


def _append(
    chunk: Chunk,
    encoder: Tokenizer,
    end_token: int | None,
    dtype: np.dtype,
    tokens: BinaryIO,
    offsets: BinaryIO,
    progress: Progress,
) -> None:
    for encoded, is_end in zip(encoder.encode(chunk.texts), chunk.ends, strict=True):
        tokens.write(encoded.astype(dtype).tobytes())
        progress.tokens += len(encoded)
        if not is_end:
            continue
        if end_token is not None:
            tokens.write(np.array([end_token], dtype).tobytes())
            progress.tokens += 1
        offsets.write(np.array([progress.tokens], "<i8").tobytes())
        progress.offsets += 1
    progress.position = chunk.position
    progress.read += chunk.size


def _read_progress(out: Path, arguments: Json) -> Progress:
    path = out / "progress.json"
    if path.exists():
        saved = json.loads(path.read_bytes())
        _check_same(saved["plan"], arguments, out)
        return Progress.from_json(saved["state"])
    tokens = out / "tokens.bin"
    has_tokens = tokens.exists() and tokens.stat().st_size > 0
    if has_tokens and not (out / "documents.bin").exists():
        raise ConfigError(
            f"'{tokens}' exists and does not come from an unfinished prepare. Choose another --out."
        )
    return Progress()


@contextmanager
def _open_at(path: Path, size: int) -> Iterator[BinaryIO]:
    """Open a file to append to its first `size` bytes, which are valid; the rest is dropped."""
    with path.open("r+b" if path.exists() else "w+b") as file:
        if os.fstat(file.fileno()).st_size < size:
            raise DataError(
                f"'{path}' has fewer than the {size} bytes that were written."
                f" Remove '{path.parent}' and prepare again."
            )
        file.truncate(size)
        file.seek(size)
        yield file


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Admit one process at a time; the lock ends with the process."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUseError(
                f"another process is preparing '{out}'. Wait for it, or choose another --out."
            ) from None
        yield
    finally:
        os.close(descriptor)


# Reading


def _chunks(
    inputs: list[Input], position: Position, arguments: Json
) -> Iterator[Chunk]:
    """Yield the text of all inputs from a position on."""
    field = arguments["field"]
    is_bytes = arguments["tokenizer"]["sha256"] is None
    for item in inputs[position.file :]:
        if item.path.suffix == ".jsonl":
            yield from _read_json_lines(item, position, field)
        elif item.path.suffix == ".parquet":
            yield from _read_parquet(item, position, field)
        else:
            yield from _read_text(item, position, check_utf8=not is_bytes)
        position = Position(item.number + 1)


def _read_text(item: Input, position: Position, check_utf8: bool) -> Iterator[Chunk]:
    """Read a text file as one document.

    It is divided at line ends, or between characters in a line longer than `CHUNK`.
    """
    offset = position.offset
    with item.path.open("rb") as file:
        while offset < item.size:
            file.seek(offset)
            text = file.read(min(CHUNK, item.size - offset))
            if not text:
                raise _became_shorter(item, offset)
            if offset + len(text) < item.size:
                up_to_line_end = text[: text.rfind(b"\n") + 1]
                text = up_to_line_end or _complete_characters(text)
            if check_utf8:
                _check_utf8(text, item.path, offset)
            offset += len(text)
            is_end = offset >= item.size
            following = (
                Position(item.number + 1) if is_end else Position(item.number, offset)
            )
            yield Chunk([text], [is_end], following, len(text))


def _became_shorter(item: Input, offset: int) -> DataError:
    return DataError(
        f"'{item.path}' had {item.size} bytes at the start and now ends at byte {offset}."
    )


def _complete_characters(text: bytes) -> bytes:
    """Drop the bytes of an incomplete UTF-8 character at the end."""
    for count in range(1, 5):
        byte = text[-count]
        # Continuation bytes begin with the bits 10.
        if byte & 0xC0 != 0x80:
            length = next(
                size
                for size, limit in ((1, 0x80), (2, 0xE0), (3, 0xF0), (4, 0x100))
                if byte < limit
            )
            return text if length <= count else text[:-count]
    return text


def _check_utf8(text: bytes, path: Path, offset: int) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{path}' is not UTF-8 at byte {offset + error.start}: {error.reason}."
        ) from None


def _read_json_lines(item: Input, position: Position, field: str) -> Iterator[Chunk]:
    offset, record = position.offset, position.record
    with item.path.open("rb") as file:
        file.seek(offset)
        while offset < item.size:
            texts = []
            start = offset
            for line in iter(file.readline, b""):
                offset += len(line)
                if line.strip():
                    texts.append(
                        _json_text(line, field, f"'{item.path}', record {record}")
                    )
                    record += 1
                if offset - start >= CHUNK:
                    break
            if offset == start:
                raise _became_shorter(item, offset)
            following = Position(item.number, offset, record)
            yield Chunk(texts, [True] * len(texts), following, offset - start)


def _json_text(line: bytes, field: str, name: str) -> bytes:
    """Return the text of a line of a .jsonl file."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{name} is not JSON: {error}") from None
    if isinstance(value, dict):
        return _encoded(value.get(field), field, name, f"it has {', '.join(value)}")
    return _encoded(None, field, name, f"it is a {type(value).__name__}")


def _encoded(value: object, field: str, name: str, content: str) -> bytes:
    """Return a field as UTF-8; `content` says what the record has instead of text."""
    if not isinstance(value, str):
        raise DataError(
            f"{name} has no text in field '{field}'; {content}. Set --field."
        )
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} has half of a character in field '{field}': {error.reason}."
        ) from None


def _read_parquet(item: Input, position: Position, field: str) -> Iterator[Chunk]:
    file = open_parquet(item.path)
    names = file.schema_arrow.names
    if field not in names:
        raise DataError(
            f"'{item.path}' has no column '{field}'; it has {', '.join(names)}. Set --field."
        )
    num_rows = file.metadata.num_rows
    offset = position.offset
    group_end = 0
    for group in range(file.metadata.num_row_groups):
        row = group_end
        group_end += file.metadata.row_group(group).num_rows
        if group_end <= offset:
            continue
        try:
            batches = file.iter_batches(
                batch_size=PARQUET_ROWS,
                row_groups=[group],
                columns=[field],
                use_threads=False,
            )
            for batch in batches:
                values = batch.column(0).to_pylist()
                # Rows before the position were read by an earlier start.
                num_done = max(offset - row, 0)
                row += len(values)
                if num_done >= len(values):
                    continue
                texts = [
                    _encoded(
                        value,
                        field,
                        f"'{item.path}', record {offset + index}",
                        f"it is a {type(value).__name__}",
                    )
                    for index, value in enumerate(values[num_done:])
                ]
                # Rows differ in size: attribute the bytes of the file evenly.
                size = item.size * row // num_rows - item.size * offset // num_rows
                offset = row
                yield Chunk(
                    texts, [True] * len(texts), Position(item.number, offset), size
                )
        except OSError as error:
            raise DataError(
                f"'{item.path}', record {offset}: row group {group} cannot be read: {error}"
            ) from None


# Progress


@contextmanager
def _progress_bar(total: int, done: int) -> Iterator[ShowProgress]:
    """Show a bar on a terminal, elsewhere a line now and then."""
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        last_line = time.monotonic()

        def show_line(read: int, tokens: int) -> None:
            nonlocal last_line
            if time.monotonic() - last_line > LINE_SECONDS:
                last_line = time.monotonic()
                share = read / max(total, 1)
                text = f"{share:.0%}: {read:,} of {total:,} bytes, {tokens:,} tokens"
                console.print(text, highlight=False)

        yield show_line
        return
    columns = (
        bars.TextColumn("preparing"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TextColumn("{task.fields[tokens]} tokens"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, completed=done, tokens="0")
        yield lambda read, tokens: bar.update(
            task, completed=read, tokens=f"{tokens:,}"
        )
