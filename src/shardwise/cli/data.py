"""`shardwise data prepare` and `shardwise data show`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, Parser
from shardwise.text import did_you_mean

HELP = """\
shardwise data prepare INPUT... --out DIR    text to a file of tokens; the same command goes on where it was stopped
  INPUT              text files, .jsonl, .parquet, or directories of them
  --out DIR          where tokens.bin, documents.bin and tokens.json go
  --tokenizer FILE   a tokenizer.json; without it, every byte is a token
  --field NAME       where the text is in .jsonl and .parquet; 'text' when not said
  --end-token TEXT   ends every document; when not said, the usual one of the tokenizer; '' for none

shardwise data show TARGET                   what is in prepared data, or in the batch of a step of a run
  TARGET             a prepared directory, a .bin or .npy file of tokens, or a recipe with its arguments
  --step N           recipe: the batch that makes step N, as metrics.jsonl counts them; 1 when not said
  --rows K           how many rows or documents to show; 3 when not said
  --dtype NAME       of a .bin file without a .json beside it
"""


def main(args: list[str], options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Runs `shardwise data ARGS`; returns what it found and the exit code."""
    if (
        not args
        or {"-h", "--help"} & set(args[:1])
        or ({"-h", "--help"} & set(args) and args[0] == "prepare")
    ):
        print(HELP, end="")
        return {}, 0 if args else 2
    verb, *rest = args
    if verb not in VERBS:
        raise ConfigError(
            f"there is no command 'data {verb}'; there are {', '.join(VERBS)}.{did_you_mean(verb, VERBS)}"
        )
    return VERBS[verb](rest, options), 0


def _prepare(args: list[str], options: argparse.Namespace) -> dict[str, Any]:
    from shardwise.data.prepare import prepare

    parser = Parser(
        help_text=HELP, prog="shardwise data prepare", add_help=False, allow_abbrev=False
    )
    parser.add_argument("inputs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--field", default="text")
    parser.add_argument("--end-token")
    said = parser.parse_args(args)
    info, worked = prepare(
        said.inputs, said.out, tokenizer=said.tokenizer, field=said.field, end_token=said.end_token
    )
    state = "prepared" if worked else "nothing to do, this is finished:"
    print(
        f"{state} {info['tokens']:,} tokens ({info['dtype']}) in {info['documents']:,} documents: {said.out}",
        file=sys.stderr,
    )
    if worked:
        print(
            f"next:\n  shardwise data show {said.out}\n  shardwise train recipes/tokens_gpt.py --data {said.out}",
            file=sys.stderr,
        )
    return {"out": str(said.out), **info}


def _show(args: list[str], options: argparse.Namespace) -> dict[str, Any]:
    from shardwise.cli.data_show import show_batch, show_tokens

    parser = Parser(help_text=HELP, prog="shardwise data show", add_help=False, allow_abbrev=False)
    parser.add_argument("target")
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--dtype")
    said, rest = parser.parse_known_args(args)
    if said.step < 1 or said.rows < 0:
        raise ConfigError(
            f"--step {said.step} --rows {said.rows}: steps count from 1, as in metrics.jsonl, and rows from 0."
        )
    if said.target.partition(":")[0].endswith(".py"):
        return show_batch(
            said.target, rest, said.step, said.rows, getattr(options, "cpu_devices", None)
        )
    if rest:
        raise ConfigError(
            f"{' '.join(rest)} is not known for a file of tokens; there are --rows and --dtype."
        )
    return show_tokens(Path(said.target), said.rows, said.dtype)


VERBS = {"prepare": _prepare, "show": _show}
