"""Runs a page of the documents: its code and its commands, in order, in one folder; what they print must be what is shown.

    ```python     run in one namespace for the whole page
    ```console    commands, each after "$ "; "# exit code 2" after one says how it must end (else 0), and
                  "# stop it" that Ctrl-C comes after 20 steps of its --out
    ```text       right after one of these: what it prints, word by word, "..." for anything

A comment on the line before a block says what is special about it:

    <!-- file: first.py -->      written to that file, not run
    <!-- shown: why -->          not run: another library, other hardware, a network
    <!-- output not shown -->    it prints something that is left out
    <!-- figures differ -->      numbers of the output may be others, and how wide they make a table
    <!-- standard error -->      the output is some lines of standard error; "standard error, figures differ" is both

Blocks of other languages only show something.
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
    r"|file: [\w./]+|output not shown|figures differ|standard error|standard error, figures differ|shown: .{5,}"
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
    line: int  # of the page, counted from 1: the first of its text
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
    """A command that has ended as it should."""

    line: str
    printed: str  # to standard output
    said: str  # to standard error


@dataclass(frozen=True)
class Ran:
    names: dict  # that the page's Python has made
    printed: list[str]  # by each block of Python
    commands: list[Done]


def blocks_of(page: Path) -> list[Block]:
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
    return [
        line
        for block in blocks_of(page)
        if block.language == "console"
        for line in block.text.splitlines()
    ]


def same_words(printed: str, shown: str, figures_differ: bool) -> bool:
    """Lines are wrapped on pages; "..." stands for any words."""
    if figures_differ:
        printed, shown = (
            FIGURE.sub("#", RULE.sub(" ", text)) for text in (printed, shown)
        )
    pattern = r"\s+".join(
        ".*?" if word == "..." else re.escape(word) for word in shown.split()
    )
    return re.fullmatch(pattern, " ".join(printed.split()), re.DOTALL) is not None


def same_lines(said: str, shown: str, figures_differ: bool) -> bool:
    """Whether every line that is shown is one of those that were said."""
    return all(
        any(same_words(line, wanted, figures_differ) for line in said.splitlines())
        for wanted in shown.splitlines()
    )


def run_page(
    page: Path,
    folder: Path,
    names: dict | None = None,
    stdin: str = "",
    languages: tuple[str, ...] = LANGUAGES,
) -> Ran:
    """Runs everything on the page that is in these languages, with `folder` as the working directory.

    Its Python finds `names`, and its commands `stdin` as their standard input.
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
    if block.shown is None:  # commands may print more than a page wants to show
        return
    printed = "".join(
        one.said if block.of_standard_error else one.printed for one in done
    )
    same = same_lines if block.of_standard_error else same_words
    assert same(printed, block.shown, block.figures_differ), (
        f"{place} printed:\n{printed}"
    )


def run_command(line: str, stdin: str = "") -> Done:
    """In this process, which has eight devices, unless it wants another number of them."""
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
