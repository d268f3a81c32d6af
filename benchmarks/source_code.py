"""The Python source code that is installed on a machine, as tokens of a vocabulary made for it.

    python -m benchmarks.source_code build/code.npz

It is a text of 100 MB or more that every machine with PyTorch or JAX has, so that long runs need
no download. Files that occur twice count once, and every 40th file is validation data. With 160 MB,
3,000 steps of 12 x 1024 tokens see no token twice.
"""

import hashlib
import sys
import sysconfig
from pathlib import Path

import numpy as np

# The vocabulary size of GPT-2.
NUM_TOKENS = 50_257
END = "<|endoftext|>"
# The vocabulary is made from this many characters.
NUM_CHARACTERS = 30_000_000


def source_files(max_bytes: int) -> list[str]:
    """Return the texts of Python files, in an order that is random but always the same."""
    paths = sysconfig.get_paths()
    roots = {Path(paths[name]) for name in ("stdlib", "purelib", "platlib")}
    found: dict[str, str] = {}
    for root in sorted(roots):
        for path in sorted(root.rglob("*.py")):
            text = path.read_text(errors="ignore")
            found[hashlib.sha256(text.encode()).hexdigest()] = text
    texts, total = [], 0
    for _, text in sorted(found.items()):
        total += len(text)
        if total > max_bytes:
            break
        texts.append(text)
    return texts


def write_tokens(path: Path, max_bytes: int = 160_000_000) -> None:
    """Write training and validation tokens, uint16, to an npz file."""
    # Not a dependency of shardwise.
    from tokenizers import ByteLevelBPETokenizer

    texts = source_files(max_bytes)
    tokenizer = ByteLevelBPETokenizer()
    average = sum(map(len, texts)) / len(texts)
    sample = texts[: int(NUM_CHARACTERS / average)]
    tokenizer.train_from_iterator(
        sample, vocab_size=NUM_TOKENS, special_tokens=[END], show_progress=False
    )
    end = tokenizer.token_to_id(END)
    encoded = [
        np.asarray([*encoding.ids, end], np.uint16)
        for encoding in tokenizer.encode_batch(texts)
    ]
    validation = np.concatenate(encoded[::40])
    train = np.concatenate([x for i, x in enumerate(encoded) if i % 40])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, train=train, validation=validation)
    print(
        f"{len(texts):,} files, {sum(map(len, texts)):,} characters: {len(train):,} tokens, and "
        f"{len(validation):,} for validation"
    )


if __name__ == "__main__":
    write_tokens(Path(sys.argv[1]))
