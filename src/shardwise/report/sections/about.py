"""What runs were and what they wrote, as sections of a report: arguments, versions, source, samples, and what differs."""

import json
from collections.abc import Sequence
from typing import Any

from shardwise.report.html import code, escape, facts, row, section, table
from shardwise.rundir.files import RunRecord
from shardwise.text import NONE

MOST_SAMPLES = 12
MOST_TEXT = 4000  # characters of a sample


def differences_section(runs: Sequence[RunRecord]) -> str:
    """Arguments, and what else run.json says, where the runs are not alike."""
    described = [_described(run) for run in runs]
    names = list(dict.fromkeys(name for one in described for name in one))
    rows_ = []
    for name in names:
        values = [one.get(name) for one in described]
        if len(set(values)) > 1:
            rows_.append(
                row(
                    [
                        code(name),
                        *(code(value[:200]) if value is not None else NONE for value in values),
                    ]
                )
            )
    if not rows_:
        text = "<p>Their arguments, versions and devices are the same.</p>"
    else:
        text = table("What differs between the runs", ["what", *(run.name for run in runs)], rows_)
        text += f'<p class="note">{len(names) - len(rows_):,} more arguments and versions are the same in all.</p>'
    return section("differences", "What differs", text)


def _described(run: RunRecord) -> dict[str, str]:
    found = {"recipe": str(run.about.get("recipe", ""))} if "recipe" in run.about else {}
    for part in ("arguments", "versions", "devices", "git"):
        value = run.about.get(part)
        if isinstance(value, dict):
            found |= {
                (name if part == "arguments" else f"{part}: {name}"): _text(inner)
                for name, inner in value.items()
                if name != "out"
            }
    for name in ("mesh", "seed", "compute_dtype", "accumulate", "steps"):
        if name in run.about and name not in found:
            found[name] = _text(run.about[name])
    if isinstance(digest := run.about.get("source_digest"), str):
        found["source of the recipe"] = digest[:12]
    return found


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):
        return str(type(value))


def samples_section(runs: Sequence[RunRecord]) -> str:
    body = ""
    for run in runs:
        texts = [s for s in run.samples if isinstance(s.get("text"), str)]
        if not texts:
            continue
        body += f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        shown = texts[-MOST_SAMPLES:] if len(runs) == 1 else texts[-1:]
        for i, one in enumerate(reversed(shown)):
            text = one["text"]
            cut = (
                f'<p class="note">{len(text) - MOST_TEXT:,} more characters.</p>'
                if len(text) > MOST_TEXT
                else ""
            )
            is_open = " open" if i == 0 else ""
            body += (
                f"<details{is_open}><summary>After step {int(one['step']):,}</summary>"
                f'<pre tabindex="0">{escape(text[:MOST_TEXT])}</pre>{cut}</details>'
            )
        if len(shown) < len(texts):
            body += f'<p class="note">{len(texts) - len(shown):,} earlier ones are in samples.jsonl.</p>'
    return section("samples", "Samples", body) if body else ""


def about_section(run: RunRecord) -> str:
    about = run.about
    known = {}
    for name in ("recipe", "mesh", "seed", "compute_dtype", "accumulate", "steps", "source_digest"):
        if name in about:
            known[escape(name.replace("_", " "))] = code(_text(about[name])[:300])
    for name in ("devices", "git"):
        if isinstance(value := about.get(name), dict):
            known[name] = escape(
                ", ".join(f"{k} {_text(v)[:200]}" for k, v in list(value.items())[:20])
            )
        elif value is not None:
            known[name] = escape(_text(value)[:300])
    known["directory"] = code(run.name)
    parts = [f"<div><h3>The run</h3>{facts(known)}</div>"]
    for name, heading in (("arguments", "Arguments"), ("versions", "Versions")):
        if isinstance(value := about.get(name), dict) and value:
            parts.append(
                f"<div><h3>{heading}</h3>{facts({escape(k[:200]): code(_text(v)[:300]) for k, v in list(value.items())[:200]})}</div>"
            )
    body = f'<div class="columns">{"".join(parts)}</div>'
    for name, heading in (
        ("model", "Model"),
        ("data", "Data"),
        ("optimizer", "Optimizer, by parameter"),
    ):
        if name in about:
            body += f'<details><summary>{heading}</summary><pre tabindex="0">{escape(_pretty(about[name]))}</pre></details>'
    return section("run", "What the run was", body + _source(run))


def _pretty(value: Any) -> str:
    try:
        text = json.dumps(value, indent=2)
    except (ValueError, RecursionError):
        return "nested too deeply to be shown"
    return text[:50_000] + ("\n…" if len(text) > 50_000 else "")


def _source(run: RunRecord) -> str:
    source = run.about.get("source")
    if not isinstance(source, str):
        return ""
    more = "\n…" if len(source) > 200_000 else ""
    heading = f"Source of the recipe, {source.count(chr(10)):,} lines"
    return f'<details class="source"><summary>{heading}</summary><pre tabindex="0">{escape(source[:200_000])}{more}</pre></details>'


def sources_section(runs: Sequence[RunRecord]) -> str:
    body = "".join(
        f"<h3>{escape(run.name)}</h3>{_source(run) or '<p>The source is not in run.json.</p>'}"
        for run in runs
    )
    return section("sources", "Sources", body)
