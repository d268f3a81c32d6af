"""Runs a page of the documents: its code and its commands, in order, in one folder; what they print must be what is shown.

    ```python     run in one namespace for the whole page
    ```console    commands, each after "$ "; "# exit code 2" at the end of a line says how it must end (else 0), and
                  "# stop it" that Ctrl-C comes after 20 steps of its --out
    ```text       right after one of these: what it prints, word by word, "..." for anything

A comment on the line before a block says what is special about it:

    <!-- file: first.py -->      written to that file, not run
    <!-- shown: why -->          not run: another library, other hardware, a network
    <!-- figures differ -->      numbers of the output may be others

Blocks of other languages only show something.
"""

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from shardwise.cli import main

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n\n?)?```(?P<language>python|console)\n(?P<text>.*?)^```\n"
    r"(?:\n(?:</div>\n\n)?(?:<!-- (?P<shown_mark>[^\n]*?) -->\n)?```text\n(?P<shown>.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)
FIGURE = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Block:
    line: int  # of the page, counted from 1: the first of its text
    language: str
    mark: str
    text: str
    shown: str | None
    figures_differ: bool


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        differ = "figures differ" in ((match["mark"] or "") + (match["shown_mark"] or ""))
        found.append(Block(line, match["language"], match["mark"] or "", match["text"], match["shown"], differ))
    assert len(found) == len(re.findall(r"^```(?:python|console)$", text, re.MULTILINE)), f"{page}: a block is not closed, or indented"
    return found


def same_words(printed: str, shown: str, figures_differ: bool) -> bool:
    """Lines are wrapped on pages; "..." stands for any words."""
    if figures_differ:
        printed, shown = FIGURE.sub("#", printed), FIGURE.sub("#", shown)
    pattern = r"\s+".join(".*?" if word == "..." else re.escape(word) for word in shown.split())
    return re.fullmatch(pattern, " ".join(printed.split()), re.DOTALL) is not None


def run_page(page: Path, folder: Path) -> dict:
    """Runs everything on the page with `folder` as the working directory; the names that its Python has made."""
    if not (folder / "recipes").exists():
        (folder / "recipes").symlink_to(ROOT / "recipes")
    names: dict = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        for block in blocks_of(page):
            place = f"{page.name}, line {block.line}"
            if block.mark.startswith("shown: "):
                continue
            if block.mark.startswith("file: "):
                Path(block.mark.removeprefix("file: ")).write_text(block.text)
                continue
            printed = _python(page, block, names) if block.language == "python" else "".join(map(_command, block.text.splitlines()))
            if block.language == "python" or block.shown is not None:  # commands may print more than a page wants to show
                assert same_words(printed, block.shown or "", block.figures_differ), f"{place} printed:\n{printed}"
    return names


def _python(page: Path, block: Block, names: dict) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)  # noqa: S102
    return out.getvalue()


def _command(line: str) -> str:
    """What it prints to standard output. In this process, which has eight devices, unless it wants another number of them."""
    text, _, comment = line.removeprefix("$ ").partition("  #")
    words = shlex.split(text)
    assert words[0] == "shardwise", line
    expected = re.search(r"exit code (\d+)", comment)
    devices = words.index("--cpu-devices") if "--cpu-devices" in words else None
    stop = "stop it" in comment
    if stop or (devices is not None and words[devices + 1] != "8"):
        code, printed, said = _in_a_process(words[1:], stop)
    else:
        kept = words[1:] if devices is None else words[1:devices] + words[devices + 2 :]
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(kept)
        printed, said = out.getvalue(), errors.getvalue()
    assert code == int(expected[1] if expected else 0), f"{line}\nended with exit code {code}:\n{said}"
    return printed


def _in_a_process(words: list[str], stop: bool) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "shardwise.cli", *words]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        if stop:
            metrics, until = Path(words[words.index("--out") + 1], "metrics.jsonl"), time.monotonic() + 200
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
