"""The commands of shardwise and their options.

This is the only place that knows them: the parsers, the help texts and the shell completion are
all built from `COMMANDS`. Nothing here imports JAX, so help and usage errors are immediate.

To add a command, write `cli/NAME.py` with a function `main(args, shared)`, and add a `Command` and
the function with its options here.
"""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from shardwise.checkpoint.reader import step_name
from shardwise.checkpoint.resume import ACCEPTABLE
from shardwise.errors import ConfigError
from shardwise.files.paths import local_path, run_path
from shardwise.text import did_you_mean
from shardwise.trackers.base import TRACKERS

ABOUT = "shardwise trains any Flax NNX model on any device mesh."
RECIPE_NOTE = (
    "RECIPE is file.py or file.py:function; `shardwise train RECIPE --help` shows its "
    "arguments."
)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigError` for a wrong command line."""

    def error(self, message: str) -> NoReturn:
        """Raise the message, with the closest valid choice, instead of exiting."""
        hint = ""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            names = [name.strip(" '") for name in choice[2].split(",")]
            hint = did_you_mean(choice[1], names)
        raise ConfigError(f"{message}.{hint} See `{self.prog} --help`.")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks in descriptions and puts the help of an option next to its name."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28, width=100)


@dataclass(frozen=True)
class Command:
    """One command of the command line.

    Attributes:
        name: what the user types after `shardwise`.
        usage: the arguments after the name, as shown in the help.
        summary: one line for `shardwise --help`.
        add_options: adds the arguments of the command to its parser.
        module: the module whose `main(args, shared)` runs the command.
        takes_recipe: whether the first argument is a recipe, whose own arguments follow.
        notes: further lines for the help of the command.
    """

    name: str
    usage: str
    summary: str
    add_options: Callable[[Parser], None]
    module: str
    takes_recipe: bool = False
    notes: str = ""


def step_range(text: str) -> tuple[int, int]:
    """Parse "400:420" as the steps 400 to 420, and "400" as one step."""
    first, _, last = text.partition(":")
    last = last or first
    is_valid = first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)
    if not is_valid:
        raise ConfigError(
            f"'{text}' is not a range of steps. Give the first and the last one: 10:15."
        )
    return int(first), int(last)


def add_shared_options(parser: Parser) -> None:
    """Add the options that every command accepts, before or after its name."""
    parser.add_argument(
        "--cpu-devices", type=int, metavar="N", help="use the CPU as N virtual devices"
    )
    parser.add_argument(
        "--json",
        type=local_path,
        metavar="FILE",
        help="also write the result as JSON to FILE",
    )


def add_train_options(parser: Parser) -> None:
    """Add the options of `train`; `sweep` passes them on to each of its runs."""
    parser.add_argument(
        "--accept",
        action="append",
        default=[],
        choices=list(ACCEPTABLE),
        help="resume although this has changed; may be repeated",
    )
    parser.add_argument(
        "--force-unlock",
        action="store_true",
        help="take over a run directory that a run on another machine did not release",
    )
    parser.add_argument(
        "--track",
        action="append",
        default=[],
        choices=list(TRACKERS),
        help="also log to this experiment tracker; may be repeated",
    )
    parser.add_argument(
        "--profile",
        type=step_range,
        metavar="FIRST:LAST",
        help="trace these steps for Perfetto or TensorBoard",
    )
    parser.add_argument(
        "--no-plan",
        action="store_true",
        help="start even if the step seems to need more memory than the device has",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="measure the optimizer, and refuse to start if there are findings",
    )
    parser.add_argument(
        "--audit-every",
        type=int,
        metavar="N",
        help="compare the bits of two computations every N steps, to find faulty devices",
    )
    parser.add_argument(
        "--no-deterministic",
        action="store_true",
        help="on GPUs, use faster kernels that do not give the same bits every time",
    )
    parser.add_argument(
        "--watchdog",
        type=float,
        metavar="SECONDS",
        help="exit with code 6 after this long without progress"
        " (default: 300 with several processes, otherwise never; 0 means never)",
    )


def add_process_options(parser: Parser) -> None:
    """Add the options that say which process of a group this is."""
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0; Slurm, Open MPI, Kubernetes and Cloud TPUs are detected",
    )
    parser.add_argument(
        "--num-processes", type=int, metavar="N", help="number of processes"
    )
    parser.add_argument(
        "--process-id", type=int, metavar="I", help="index of this process"
    )
    parser.add_argument(
        "--bind",
        metavar="ADDRESS",
        help="address on which process 0 listens (default: that of the coordinator)",
    )


def add_plot_option(parser: Parser) -> None:
    """Add the option of `explain`."""
    parser.add_argument(
        "--plot",
        type=local_path,
        metavar="FILE",
        help="plot the learning rate of every group as PNG",
    )


def _train(parser: Parser) -> None:
    add_train_options(parser)
    add_process_options(parser)


def _plan(parser: Parser) -> None:
    parser.add_argument(
        "--on",
        default="",
        metavar="TARGET",
        help="hardware to plan for: cpu:8, gpu:8, h200:8, v5e:4x4, v5p:8x8x8, 2*v5e:16x16 ..."
        " (default: the devices of this machine)",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="rank all meshes of that many devices, with accumulation and rematerialization"
        " where memory is short",
    )
    parser.add_argument(
        "--compile-at-most",
        type=int,
        metavar="N",
        help="compile at most N candidates of a search (default: a third of them)",
    )
    parser.add_argument(
        "--largest-batch",
        action="store_true",
        help="find the largest batch_size of the recipe that fits",
    )
    parser.add_argument(
        "--tokens",
        type=float,
        metavar="N",
        help="also report the time and chip-hours for N tokens (or images ...), for example 3e11",
    )
    parser.add_argument(
        "--html", type=local_path, metavar="FILE", help="write the plan as a web page"
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="compile again instead of reading cached plans",
    )


def _verify(parser: Parser) -> None:
    parser.add_argument(
        "--meshes",
        nargs="+",
        metavar="MESH",
        help="for example data=8 data=4,model=2 (default: a handful that suit the model)",
    )
    parser.add_argument(
        "--verify-steps",
        type=int,
        default=3,
        metavar="N",
        help="steps to compare (default: 3)",
    )
    parser.add_argument(
        "--real-devices",
        action="store_true",
        help="use the devices of this machine instead of virtual CPU devices (8 by default)",
    )


def _launch(parser: Parser) -> None:
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes in total (default: 1); GPUs are divided among them, and --cpu-devices"
        " applies to each",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="restart all processes up to N times when one is lost or stuck (exit code 6) or was"
        " stopped (75); gives up after 3 consecutive starts without a new checkpoint",
    )
    parser.add_argument(
        "--write",
        choices=["slurm", "k8s"],
        help="write a job file instead of starting processes",
    )
    parser.add_argument(
        "--to",
        type=local_path,
        metavar="FILE",
        help="path of the job file (default: standard output)",
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="nodes of the job"
    )
    parser.add_argument(
        "--gpus", type=int, default=0, metavar="N", help="GPUs per node"
    )
    parser.add_argument(
        "--cpus", type=int, default=0, metavar="N", help="CPU cores per process"
    )
    parser.add_argument(
        "--memory", default="", metavar="SIZE", help="memory per node, for example 64G"
    )
    parser.add_argument(
        "--hours",
        type=float,
        default=24.0,
        metavar="H",
        help="time limit of one start (slurm; default: 24); a longer run resumes in the next",
    )
    parser.add_argument("--name", default="shardwise", help="name of the job")
    parser.add_argument("--image", default="", help="container image (k8s)")
    parser.add_argument(
        "--volume", default="", metavar="CLAIM", help="persistent volume claim (k8s)"
    )


def _data(parser: Parser) -> None:
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog=parser.prog
    )
    prepare = commands.add_parser(
        "prepare",
        help="tokenize text into a file of tokens; the same command resumes it",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    prepare.add_argument(
        "inputs",
        nargs="+",
        type=local_path,
        metavar="INPUT",
        help="text files, .jsonl, .parquet, or directories of them",
    )
    prepare.add_argument(
        "--out",
        type=local_path,
        required=True,
        metavar="DIR",
        help="directory for tokens.bin, documents.bin and tokens.json",
    )
    prepare.add_argument(
        "--tokenizer",
        type=local_path,
        metavar="FILE",
        help="a tokenizer.json (default: every byte is a token)",
    )
    prepare.add_argument(
        "--field",
        default="text",
        metavar="NAME",
        help="field with the text in .jsonl and .parquet (default: text)",
    )
    prepare.add_argument(
        "--end-token",
        metavar="TEXT",
        help="token after every document (default: that of the tokenizer; '' for none)",
    )
    show = commands.add_parser(
        "show",
        help="show what prepared data, or the batch of a step, contains",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    show.add_argument(
        "target",
        metavar="TARGET",
        help="a prepared directory, a .bin or .npy file of tokens, or a recipe with its arguments",
    )
    show.add_argument(
        "--step",
        type=int,
        default=1,
        metavar="N",
        help="with a recipe: the batch of step N, counted as in metrics.jsonl (default: 1)",
    )
    show.add_argument(
        "--rows",
        type=int,
        default=3,
        metavar="K",
        help="examples or documents to show (default: 3)",
    )
    show.add_argument(
        "--dtype", metavar="NAME", help="dtype of a .bin file without a .json file"
    )


CHECKPOINT_NOTES = """\
TARGET is a run directory, its 'checkpoints' directory, or one step: runs/a, runs/a --step 200,
runs/a/checkpoints/200. Without a step it means the newest. All commands work on one CPU, whatever
hardware wrote the checkpoint."""


def _checkpoint(parser: Parser) -> None:
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog=parser.prog
    )

    def command(
        name: str, help: str, targets: int | None = None
    ) -> argparse.ArgumentParser:
        inner = commands.add_parser(
            name,
            help=help,
            description=f"{help}\n\n{CHECKPOINT_NOTES}",
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        inner.add_argument("target", type=local_path, nargs=targets, metavar="TARGET")
        return inner

    ls = command("ls", "list the steps of a run with sizes and metrics")
    ls.add_argument(
        "--verify", action="store_true", help="also check every file against its digest"
    )
    show = command("show", "describe the run and every array of a step")
    show.add_argument(
        "--values",
        action="store_true",
        help="also show the min, max and mean of every array",
    )
    diff = command(
        "diff",
        "compare two steps bit for bit; exit code 1 if any array differs",
        targets=2,
    )
    verify = command(
        "verify", "check files against their digests; exit code 4 if any is damaged"
    )
    export = command("export", "write the weights as safetensors, or for transformers")
    export.add_argument(
        "--out",
        type=local_path,
        required=True,
        metavar="PATH",
        help="file to write; with --format hf, the directory",
    )
    export.add_argument(
        "--format",
        choices=["safetensors", "hf", "gpt2"],
        default="safetensors",
        help="hf writes a directory for transformers; gpt2 means the same",
    )
    export.add_argument(
        "--average",
        action="store_true",
        help="export the averaged weights of the optimizer",
    )
    export.add_argument(
        "--base",
        metavar="PATH",
        help="where the frozen weights of a fine-tuned run are, if they were moved",
    )
    export.add_argument(
        "--trained-only",
        action="store_true",
        help="omit frozen weights and do not merge adapters into them",
    )
    export.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="with --format hf: keep only the first N rows of the embedding",
    )
    for inner in (show, diff, verify, export):
        inner.add_argument(
            "--step",
            type=step_name,
            metavar="N",
            help="this step, or 'best', instead of the newest",
        )


def _report(parser: Parser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        type=local_path,
        metavar="RUN",
        help="run directories, compared side by side",
    )
    parser.add_argument(
        "--out",
        type=local_path,
        metavar="FILE",
        help="file to write (default: RUN/report.html, or report.html for several runs)",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="serve the page on 127.0.0.1 under a secret address and refresh it during the run",
    )
    parser.add_argument(
        "--port",
        type=int,
        metavar="N",
        help="with --watch: the port (default: a free one)",
    )
    parser.add_argument(
        "--every",
        type=float,
        metavar="S",
        help="with --watch: seconds between reads (default: 3)",
    )


def _sample(parser: Parser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run, one of its steps, published weights, or hf:owner/name",
    )
    parser.add_argument(
        "--prompt",
        required=True,
        metavar="TEXT",
        help="the text to continue; - reads it from standard input",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=200,
        metavar="N",
        help="generate at most N tokens (default: 200)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 always picks the most likely token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="keep the K most likely tokens"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="nucleus sampling: keep the smallest set of tokens whose probability reaches P",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed (default: 0)"
    )
    parser.add_argument(
        "--num", type=int, default=1, metavar="N", help="number of samples (default: 1)"
    )
    parser.add_argument(
        "--step",
        type=step_name,
        metavar="N",
        help="this step, or 'best', instead of the newest",
    )
    parser.add_argument(
        "--average",
        action="store_true",
        help="use the averaged weights of the optimizer",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="a tokenizer.json, 'bytes', or 'characters:FILE' for the characters of a text file, "
        "if RUN does not name one",
    )
    parser.add_argument(
        "--mesh",
        help="shard the model over all devices, for example model=2 (default: one device)",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="dtype of weights and arithmetic (default: that of the weights)",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="recompute all tokens for every new one; the text is the same",
    )
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="recipe that builds the model, if its arrays do not identify it; the file is executed",
    )


def _replay(parser: Parser) -> None:
    parser.add_argument("run", type=local_path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--steps",
        type=step_range,
        required=True,
        metavar="FIRST:LAST",
        help="the steps to compute again",
    )
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="recipe of the run, with its recorded arguments; the file is executed",
    )


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 1")
    return int(text)


def _add_jobs(parser: Parser, condition: str = "") -> None:
    """Add the option of commands that train several runs.

    Args:
        parser: the parser of the command.
        condition: which other option it needs.
    """
    parser.add_argument(
        "--jobs",
        type=positive,
        default=1,
        metavar="N",
        help=f"{condition}train N runs at a time, with one log file each (default: 1)",
    )


def _sweep(parser: Parser) -> None:
    parser.add_argument(
        "--out",
        type=run_path,
        metavar="DIR",
        help="directory of the runs, one per combination (default: sweeps/RECIPE)",
    )
    parser.add_argument(
        "--retry", action="store_true", help="also run failed combinations again"
    )
    _add_jobs(parser)
    parser.add_argument(
        "--by",
        metavar="METRIC",
        help="sort by eval_loss, loss ... (default: the metric that selects the best checkpoint)",
    )
    parser.add_argument(
        "--largest", action="store_true", help="with --by: larger values are better"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the grid and run nothing"
    )
    add_train_options(parser)


def size_list(text: str) -> list[int]:
    """Parse "64,128,256" as sizes in ascending order."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"'{text}' is not a list of sizes. Example: 64,128,256.")
    return sorted({int(part) for part in parts})


def _scale(parser: Parser) -> None:
    parser.add_argument(
        "--sizes",
        type=size_list,
        metavar="N,N,...",
        help="widths to show, check or train (default: the base width, times 2 and times 4)",
    )
    parser.add_argument(
        "--vary",
        metavar="NAME",
        help="argument of the recipe that sets the width (default: width)",
    )
    parser.add_argument(
        "--base",
        type=positive,
        metavar="N",
        help="width whose hyperparameters are known (default: the smallest of --sizes)",
    )
    parser.add_argument(
        "--vary-depth",
        metavar="NAME",
        help="argument of the recipe that sets the number of layers, if it is scaled too",
    )
    parser.add_argument(
        "--base-depth",
        type=positive,
        metavar="N",
        help="with --vary-depth: number of layers whose hyperparameters are known",
    )
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="PATH=ROLE",
        help="role of the parameters that match PATH: input, hidden, output, vector or finite;"
        " may be repeated",
    )
    parser.add_argument(
        "--standard",
        action="store_true",
        help="check or train the recipe without scaling, for comparison",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="coordinate check: compare the sizes of activations and of their changes",
    )
    parser.add_argument(
        "--check-steps",
        type=positive,
        default=3,
        metavar="N",
        help="with --check: training steps (default: 3)",
    )
    parser.add_argument(
        "--seeds",
        type=positive,
        metavar="N",
        help="models of each width to average over, with --transfer at its best rate only"
        " (default: 3 with --check, 1 with --transfer)",
    )
    parser.add_argument(
        "--transfer",
        action="store_true",
        help="train all sizes with all --rates, and predict the largest model",
    )
    parser.add_argument(
        "--rates",
        metavar="LOW:HIGH:N",
        help="with --transfer: learning rates, evenly spaced on a log scale",
    )
    parser.add_argument(
        "--rate-name",
        default="lr",
        metavar="NAME",
        help="with --transfer: argument of the recipe that sets the rate (default: lr)",
    )
    parser.add_argument(
        "--to",
        type=positive,
        metavar="N",
        help="with --transfer: the width to predict and to price",
    )
    parser.add_argument(
        "--on",
        default="",
        metavar="TARGET",
        help="with --to: hardware to price the run for, as for `shardwise plan`",
    )
    parser.add_argument(
        "--out",
        type=run_path,
        metavar="DIR",
        help="directory of runs and pictures (default: scales/RECIPE)",
    )
    parser.add_argument(
        "--retry", action="store_true", help="with --transfer: run failed runs again"
    )
    _add_jobs(parser, "with --transfer: ")


def _doctor(parser: Parser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        type=local_path,
        metavar="RUN",
        help="check this run directory instead: its lock, checkpoints, errors and next step",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=90.0,
        metavar="S",
        help="seconds that each stage of the device check may take (default: 90)",
    )
    parser.add_argument(
        "--no-devices", action="store_true", help="do not check the devices"
    )


COMMANDS = (
    Command(
        "train",
        "RECIPE [arguments of the recipe]",
        "train, or resume from the newest checkpoint in the run directory",
        _train,
        "shardwise.cli.train",
        takes_recipe=True,
    ),
    Command(
        "plan",
        "RECIPE [--on TARGET] [--search] [arguments of the recipe]",
        "memory, speed and the best mesh, for hardware you need not have",
        _plan,
        "shardwise.cli.plan",
        takes_recipe=True,
    ),
    Command(
        "verify",
        "RECIPE [arguments of the recipe]",
        "check that meshes compute the same as one device",
        _verify,
        "shardwise.cli.verify",
        takes_recipe=True,
        notes="Exit code 0 if all meshes agree, 5 if one differs.",
    ),
    Command(
        "explain",
        "RECIPE [arguments of the recipe]",
        "what the optimizer does to each parameter, how each array is sharded, likely mistakes",
        add_plot_option,
        "shardwise.cli.explain",
        takes_recipe=True,
    ),
    Command(
        "replay",
        "RUN --steps FIRST:LAST --recipe RECIPE",
        "compute steps of a run again, and compare them with what it recorded",
        _replay,
        "shardwise.cli.replay",
        notes="""\
Starts from the newest checkpoint before the first step, or from the initial state. On the same
devices, versions and mesh, losses, gradient norms and digests of the state must be equal bit for
bit; elsewhere within a tolerance. Arguments of the recipe may follow, for example --mesh.
Exit code 0 if all steps agree, 5 if one differs.""",
    ),
    Command(
        "launch",
        "[--processes N] -- train RECIPE ...",
        "run a command on several local processes, or write a job file for a cluster",
        _launch,
        "shardwise.cli.launch",
    ),
    Command(
        "data",
        "prepare | show ...",
        "tokenize text; show what a data set or a batch contains",
        _data,
        "shardwise.cli.data",
    ),
    Command(
        "checkpoint",
        "ls | show | diff | verify | export ...",
        "inspect, check, compare and export checkpoints",
        _checkpoint,
        "shardwise.cli.checkpoint",
        notes=CHECKPOINT_NOTES,
    ),
    Command(
        "sample",
        "RUN --prompt TEXT",
        "generate text from a trained or published model",
        _sample,
        "shardwise.cli.sample",
        notes="""\
RUN is a run directory, one of its checkpoints, a directory as published on the Hugging Face Hub
(config.json, safetensors, tokenizer.json), or hf:owner/name. A model that shardwise ships is
recognized by its arrays; nothing in RUN is executed. For any other model name its recipe with
--recipe, followed by the arguments of the recipe.""",
    ),
    Command(
        "report",
        "RUN [RUN ...] [--watch]",
        "show runs as a web page: curves, time, layout; also during a run",
        _report,
        "shardwise.cli.report",
    ),
    Command(
        "sweep",
        "RECIPE --lr 1e-4 3e-4 --seed 0 1 ...",
        "train every combination of arguments, and compare the runs",
        _sweep,
        "shardwise.cli.sweep",
        takes_recipe=True,
        notes="""\
Arguments of the recipe with several values span the grid; all others apply to every run. If the
sweep is killed or stopped, the same command resumes it. Exit code 0 when all runs are done, 75 when
a signal stopped the sweep, otherwise that of the first failed run.""",
    ),
    Command(
        "scale",
        "RECIPE --sizes 64,128,256 [--check | --transfer --rates 1e-3:1e-1:7]",
        "hyperparameters that transfer across model sizes: roles, coordinate check, rates",
        _scale,
        "shardwise.cli.scale",
        takes_recipe=True,
        notes="""\
Without --check or --transfer, prints the role of each parameter and how it is scaled to the largest
of --sizes. Exit code 5 if a coordinate check fails. An interrupted --transfer resumes with the same
command.""",
    ),
    Command(
        "doctor",
        "[RUN]",
        "check whether training can work here, or how a run is doing",
        _doctor,
        "shardwise.cli.doctor",
        notes="Exit code 0, also with warnings; 2 if a problem prevents training.",
    ),
)
BY_NAME = {command.name: command for command in COMMANDS}


def command_parser(name: str) -> Parser:
    """Return the parser of a command: its own options, without those shared by all commands.

    Example:
        >>> command_parser("report").parse_args(["runs/a", "--watch"]).watch
        True
    """
    command = BY_NAME[name]
    recipe_note = f"\n{RECIPE_NOTE}" if command.takes_recipe else ""
    parser = Parser(
        prog=f"shardwise {name}",
        usage=f"shardwise {name} {command.usage}",
        description=f"{command.summary}\n{recipe_note}",
        epilog=command.notes,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        # A recipe has its own --help, so the command prints both.
        add_help=not command.takes_recipe,
    )
    command.add_options(parser)
    return parser


def shared_parser() -> Parser:
    """Return the parser of the options that may stand before or after the name of a command."""
    parser = Parser(
        prog="shardwise",
        usage="shardwise COMMAND ...",
        description=ABOUT,
        formatter_class=_HelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    add_shared_options(parser)
    add_train_options(parser)
    add_process_options(parser)
    add_plot_option(parser)
    return parser


def help_text() -> str:
    """Return the text of `shardwise --help`: every command with its summary."""
    commands = "\n".join(
        f"  {command.name:12}{command.summary}" for command in COMMANDS
    )
    parser = Parser(
        prog="shardwise",
        usage="shardwise COMMAND ...",
        description=f"{ABOUT}\n\ncommands:\n{commands}",
        epilog=f"`shardwise COMMAND --help` shows the options of a command.\n{RECIPE_NOTE}",
        formatter_class=_HelpFormatter,
    )
    add_shared_options(parser)
    # The two below are answered before anything is parsed; they are added for the help alone.
    parser.add_argument(
        "--version", action="store_true", help="print the version and exit"
    )
    parser.add_argument(
        "--completion",
        metavar="SHELL",
        help='print a completion script for bash, zsh, fish or tcsh: eval "$(shardwise'
        ' --completion bash)"',
    )
    return parser.format_help()
