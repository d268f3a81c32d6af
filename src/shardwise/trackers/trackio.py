"""The tracker for Trackio."""

import uuid
from collections.abc import Sequence

from shardwise.trackers.base import PROJECT, Record, TrackedRun


class Trackio:
    """Logs to Trackio, on this machine unless its own settings name a Space or a server.

    Args:
        project: the project; "shardwise" if None.
        **options: passed to `trackio.init`.

    Example:
        run = Run(..., trackers=(Trackio(project="gpt"),))
    """

    name = "trackio"
    rewinds = False

    def __init__(self, project: str | None = None, **options: object):
        self.project = project
        self.options = options

    def start(self, run: TrackedRun) -> str:
        """Open or resume a run of Trackio, which identifies runs by their names."""
        import trackio

        name = run.id or f"{run.name}-{uuid.uuid4().hex[:6]}"
        options = {
            "embed": False,
            "resume": "allow",
            "config": dict(run.config),
            **self.options,
        }
        self._markdown = trackio.Markdown
        self._run = trackio.init(project=self.project or PROJECT, name=name, **options)
        return name

    def log(self, records: Sequence[Record]) -> None:
        """Log the values of each step."""
        for step, values in records:
            self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Log a text, indented so that Markdown shows it verbatim."""
        indented = "\n".join("    " + line for line in text.splitlines())
        self._run.log({name: self._markdown(indented)}, step=step)

    def finish(self, exit_code: int) -> None:
        """Close the run."""
        self._run.finish()
