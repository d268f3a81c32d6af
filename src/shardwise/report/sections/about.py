"""How runs were configured and what text they wrote, as sections of a report."""

import json
from collections.abc import Iterator, Sequence

from shardwise.report.html import code, escape, facts, plural, row, section, table
from shardwise.rundir.files import RunRecord
from shardwise.text import NONE

MAX_SAMPLES = 12
# Characters of a sample, of a value, and of longer texts. Run directories can be damaged.
MAX_SAMPLE = 4000
MAX_VALUE = 300
MAX_SHORT_VALUE = 200
MAX_JSON = 50_000
MAX_SOURCE = 200_000
# Entries of a table of arguments or versions, and of devices or the git state on one line.
MAX_ENTRIES = 200
MAX_INLINE_ENTRIES = 20
FIELDS = (
    "mesh",
    "seed",
    "compute_dtype",
    "matmul_dtype",
    "deterministic",
    "accumulate",
    "steps",
)


def differences_section(runs: Sequence[RunRecord]) -> str:
    """Return the section of several runs: the arguments and versions in which they differ."""
    settings = [_settings(run) for run in runs]
    names = list(dict.fromkeys(name for one in settings for name in one))
    rows = []
    for name in names:
        values = [one.get(name) for one in settings]
        if len(set(values)) > 1:
            shown = [
                NONE if value is None else code(value[:MAX_SHORT_VALUE])
                for value in values
            ]
            rows.append(row([code(name), *shown]))
    if not rows:
        body = "<p>Arguments, versions and devices of the runs are the same.</p>"
    else:
        head = ["setting", *(run.name for run in runs)]
        same = f"{len(names) - len(rows):,} more arguments and versions are the same in all runs."
        body = f'{table("Differences between the runs", head, rows)}<p class="note">{same}</p>'
    return section("differences", "Differences", body)


def _settings(run: RunRecord) -> dict[str, str]:
    """Return what can differ between runs, by name. The output directory always does."""
    found = {}
    if "recipe" in run.about:
        found["recipe"] = str(run.about["recipe"])
    for part in ("arguments", "versions", "devices", "git"):
        values = run.about.get(part)
        if not isinstance(values, dict):
            continue
        prefix = "" if part == "arguments" else f"{part}: "
        for name, value in values.items():
            if name != "out":
                found[f"{prefix}{name}"] = _json_text(value)
    for name in FIELDS:
        if name in run.about and name not in found:
            found[name] = _json_text(run.about[name])
    digest = run.about.get("source_digest")
    if isinstance(digest, str):
        found["source of the recipe"] = digest[:12]
    return found


def _json_text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):
        return str(type(value))


def samples_section(runs: Sequence[RunRecord]) -> str:
    """Return the section of generated texts, newest first. It is empty without samples."""
    body = ""
    for run in runs:
        samples = [
            (int(sample["step"]), sample["text"])
            for sample in run.samples
            if isinstance(sample.get("text"), str)
        ]
        if not samples:
            continue
        if len(runs) > 1:
            body += f"<h3>{escape(run.name)}</h3>"
        shown = samples[-MAX_SAMPLES:] if len(runs) == 1 else samples[-1:]
        for i, (step, text) in enumerate(reversed(shown)):
            body += _sample(step, text, is_open=i == 0)
        if len(shown) < len(samples):
            earlier = len(samples) - len(shown)
            body += (
                f'<p class="note">{earlier:,} earlier samples are in samples.jsonl.</p>'
            )
    return section("samples", "Samples", body) if body else ""


def _sample(step: int, text: str, is_open: bool) -> str:
    more = ""
    if len(text) > MAX_SAMPLE:
        more = f'<p class="note">{len(text) - MAX_SAMPLE:,} more characters.</p>'
    return (
        f"<details{' open' if is_open else ''}><summary>After step {step:,}</summary>"
        f'<pre tabindex="0">{escape(text[:MAX_SAMPLE])}</pre>{more}</details>'
    )


def about_section(run: RunRecord) -> str:
    """Return the section of one run: its configuration, versions and source."""
    parts = [f"<div><h3>Run</h3>{facts(dict(_run_facts(run)))}</div>"]
    for name, heading in (("arguments", "Arguments"), ("versions", "Versions")):
        values = run.about.get(name)
        if isinstance(values, dict) and values:
            entries = {}
            for key, value in list(values.items())[:MAX_ENTRIES]:
                entries[escape(key[:MAX_SHORT_VALUE])] = code(
                    _json_text(value)[:MAX_VALUE]
                )
            parts.append(f"<div><h3>{heading}</h3>{facts(entries)}</div>")
    body = f'<div class="columns">{"".join(parts)}</div>'
    for name, heading in (
        ("model", "Model"),
        ("data", "Data"),
        ("optimizer", "Optimizer by parameter"),
    ):
        if name in run.about:
            body += _fold(heading, _indented_json(run.about[name]))
    return section("run", "Configuration", body + _source(run))


def _run_facts(run: RunRecord) -> Iterator[tuple[str, str]]:
    for name in ("recipe", *FIELDS, "source_digest"):
        if name in run.about:
            yield name.replace("_", " "), code(_json_text(run.about[name])[:MAX_VALUE])
    for name in ("devices", "git"):
        value = run.about.get(name)
        if isinstance(value, dict):
            entries = list(value.items())[:MAX_INLINE_ENTRIES]
            texts = [
                f"{key} {_json_text(inner)[:MAX_SHORT_VALUE]}" for key, inner in entries
            ]
            yield name, escape(", ".join(texts))
        elif value is not None:
            yield name, escape(_json_text(value)[:MAX_VALUE])
    yield "directory", code(run.name)


def _fold(heading: str, text: str, kind: str = "") -> str:
    """Return a long text that is folded up until the reader opens it."""
    classes = f' class="{kind}"' if kind else ""
    content = f'<pre tabindex="0">{escape(text)}</pre>'
    return f"<details{classes}><summary>{heading}</summary>{content}</details>"


def _indented_json(value: object) -> str:
    try:
        text = json.dumps(value, indent=2)
    except (ValueError, RecursionError):
        return "nested too deeply to show"
    return text if len(text) <= MAX_JSON else text[:MAX_JSON] + "\n…"


def _source(run: RunRecord) -> str:
    source = run.about.get("source")
    if not isinstance(source, str):
        return ""
    heading = f"Source of the recipe, {plural(source.count(chr(10)), 'line')}"
    text = source if len(source) <= MAX_SOURCE else source[:MAX_SOURCE] + "\n…"
    return _fold(heading, text, "source")


def sources_section(runs: Sequence[RunRecord]) -> str:
    """Return the section of several runs: the source of the recipe of each."""
    body = ""
    for run in runs:
        source = _source(run) or "<p>run.json does not contain the source.</p>"
        body += f"<h3>{escape(run.name)}</h3>{source}"
    return section("sources", "Sources", body)
