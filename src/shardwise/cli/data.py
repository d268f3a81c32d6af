"""`shardwise data prepare` and `shardwise data show`."""

import argparse
import sys
from pathlib import Path

from shardwise.cli.options import command_parser
from shardwise.errors import ConfigError
from shardwise.text import Json


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
            raise ConfigError(f"shardwise data prepare: unknown argument {' '.join(recipe_args)}.")
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
        print(
            f"next:\n  shardwise data show {options.out}\n"
            f"  shardwise train recipes/tokens_gpt.py --data {options.out}",
            file=sys.stderr,
        )
    return {"out": str(options.out), **info}


def _show(options: argparse.Namespace, recipe_args: list[str], shared: argparse.Namespace) -> Json:
    from shardwise.cli.data_show import show_batch, show_tokens

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
