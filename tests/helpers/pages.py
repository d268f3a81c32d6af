"""Run the code and the commands of a documentation page, and compare their output with the page.

All blocks of a page run in order, in one folder:

    ```python     Python code; all blocks of a page share one namespace
    ```console    commands, each after "$ "; a command must end with exit code 0, or with
                  the 2 of "# exit code 2" after it; "# stop it" after a command sends
                  Ctrl-C after 20 steps of the run in its --out
    ```text       the output of the block before it, word by word; "..." matches anything

A comment on the line before a block changes how it runs:

    <!-- file: first.py -->      write the block to that file and do not run it
    <!-- shown: why -->          do not run it: another library, other hardware, a network
    <!-- output not shown -->    the page omits the output
    <!-- figures differ -->      numbers in the output may differ, and so may table widths
    <!-- standard error -->      the output shows some lines of standard error
    <!-- standard error, figures differ -->      both

Blocks in other languages do not run.
"""

import contextlib
import io
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.cli import main
from tests.helpers.command import start

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LANGUAGES = ("python", "console")
MARK = re.compile(
    r"|file: [\w./]+|output not shown|figures differ|standard error"
    r"|standard error, figures differ|shown: .{5,}"
)
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n\n?)?```(?P<language>python|console)\n(?P<text>.*?)^```\n"
    r"(?:\n(?:</div>\n\n)?(?:<!-- (?P<shown_mark>[^\n]*?) -->\n)?```text\n(?P<shown>.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)
FIGURE = re.compile(
    r"\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?(?:%|[kM]\b)?(?: (?:[KMGT]?i?B|m?s|[kMGT]FLOP)\b)?"
)
RULE = re.compile(r"[━┏┓┳┡┩╇└┘┴─]+")


@dataclass(frozen=True)
class Block:
    """A block of code or commands.

    Attributes:
        line: the line of the page on which its text begins, counted from 1.
        language: "python" or "console".
        mark: the comment before the block, or "".
        text: the code or the commands.
        shown: the output that the page shows after it, if any.
        shown_mark: the comment before that output, or "".
    """

    line: int
    language: str
    mark: str
    text: str
    shown: str | None
    shown_mark: str

    @property
    def figures_differ(self) -> bool:
        return "figures differ" in self.mark + self.shown_mark

    @property
    def of_standard_error(self) -> bool:
        return "standard error" in self.mark + self.shown_mark


@dataclass(frozen=True)
class Done:
    """A command that ended with the expected exit code.

    Attributes:
        line: the command, as the page shows it.
        printed: its standard output.
        said: its standard error.
    """

    line: str
    printed: str
    said: str


@dataclass(frozen=True)
class Ran:
    """A page that has run.

    Attributes:
        names: the namespace of its Python code.
        printed: the output of each Python block.
        commands: its commands, in order.
    """

    names: dict[str, object]
    printed: list[str]
    commands: list[Done]


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of Python and commands on a page."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(
            Block(
                line,
                match["language"],
                match["mark"] or "",
                match["text"],
                match["shown"],
                match["shown_mark"] or "",
            )
        )
    assert len(found) == len(
        re.findall(r"^```(?:python|console)$", text, re.MULTILINE)
    ), f"{page}: a block is not closed, or indented"
    return found


def commands_of(page: Path) -> list[str]:
    """Return the lines of all blocks of commands on a page."""
    return [
        line
        for block in blocks_of(page)
        if block.language == "console"
        for line in block.text.splitlines()
    ]


def same_words(printed: str, shown: str, figures_differ: bool) -> bool:
    """Return whether the words are the same, however lines are wrapped; "..." matches any words."""
    if figures_differ:
        printed, shown = (
            FIGURE.sub("#", RULE.sub(" ", text)) for text in (printed, shown)
        )
    pattern = r"\s+".join(
        re.escape(word[:-3]) + ".*?" if word.endswith("...") else re.escape(word)
        for word in shown.split()
    )
    return re.fullmatch(pattern, " ".join(printed.split()), re.DOTALL) is not None


def same_lines(said: str, shown: str, figures_differ: bool) -> bool:
    """Return whether every line of `shown` is among the lines of `said`."""
    return all(
        any(same_words(line, wanted, figures_differ) for line in said.splitlines())
        for wanted in shown.splitlines()
    )


def run_page(
    page: Path,
    folder: Path,
    names: dict[str, object] | None = None,
    stdin: str = "",
    languages: tuple[str, ...] = LANGUAGES,
) -> Ran:
    """Run the blocks of a page, with `folder` as the working directory.

    Args:
        page: the page.
        folder: the working directory, which gets links to the folders that pages mention.
        names: the initial namespace of the Python code.
        stdin: the standard input of the commands.
        languages: the languages to run; other blocks are skipped.
    """
    for name in ("recipes", "examples", "tests"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    ran = Ran({"__name__": "__main__", **(names or {})}, [], [])
    with contextlib.chdir(folder):
        for block in blocks_of(page):
            if block.mark.startswith("shown: ") or block.language not in languages:
                continue
            if block.mark.startswith("file: "):
                Path(block.mark.removeprefix("file: ")).write_text(block.text)
                continue
            _run_block(page, block, ran, stdin)
    return ran


def _run_block(page: Path, block: Block, ran: Ran, stdin: str) -> None:
    place = f"{page.name}, line {block.line}"
    if block.language == "python":
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), ran.names)  # noqa: S102
        ran.printed.append(printed := out.getvalue())
        if block.mark != "output not shown":
            assert same_words(printed, block.shown or "", block.figures_differ), (
                f"{place} printed:\n{printed}"
            )
        return
    done = [run_command(line, stdin) for line in block.text.splitlines()]
    ran.commands.extend(done)
    # A page need not show the output of its commands.
    if block.shown is None:
        return
    printed = "".join(
        one.said if block.of_standard_error else one.printed for one in done
    )
    same = same_lines if block.of_standard_error else same_words
    assert same(printed, block.shown, block.figures_differ), (
        f"{place} printed:\n{printed}"
    )


def run_command(line: str, stdin: str = "") -> Done:
    """Run a command in this process with its 8 devices, or in a new one with another number."""
    text, _, comment = line.removeprefix("$ ").partition("  #")
    words = shlex.split(text)
    assert words[0] == "shardwise", line
    expected = re.match(r"(?: stop it;)? exit code (\d+)", comment)
    devices = words.index("--cpu-devices") if "--cpu-devices" in words else None
    stop = comment.startswith(" stop it")
    if stop or (devices is not None and words[devices + 1] != "8"):
        code, printed, said = _in_a_process(words[1:], stop)
    else:
        kept = words[1:] if devices is None else words[1:devices] + words[devices + 2 :]
        out, errors = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(errors),
            _standard_input(stdin),
        ):
            code = main(kept)
        printed, said = out.getvalue(), errors.getvalue()
    assert code == int(expected[1] if expected else 0), (
        f"{line}\nended with exit code {code}:\n{said}"
    )
    return Done(line, printed, said)


@contextlib.contextmanager
def _standard_input(text: str) -> Iterator[None]:
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(text.encode()))
    try:
        yield
    finally:
        sys.stdin = before


def _in_a_process(words: list[str], stop: bool) -> tuple[int, str, str]:
    with start(*words, COLUMNS="200") as process:
        if stop:
            metrics, until = (
                Path(words[words.index("--out") + 1], "metrics.jsonl"),
                time.monotonic() + 200,
            )
            while process.poll() is None and time.monotonic() < until:
                if metrics.exists() and len(metrics.read_text().splitlines()) >= 20:
                    process.send_signal(signal.SIGINT)
                    break
                time.sleep(0.05)
        try:
            printed, said = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, printed, said
