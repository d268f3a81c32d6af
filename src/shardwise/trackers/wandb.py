"""The tracker for Weights & Biases."""

import html
import os
import uuid
from collections.abc import Sequence

from shardwise.trackers.base import PROJECT, Record, TrackedRun


class WandB:
    """Logs to Weights & Biases, with local files in `RUN/wandb`.

    Without a login the run stays offline, unless `WANDB_MODE` or `mode` says otherwise.

    Args:
        project: the project; `WANDB_PROJECT` or "shardwise" if None.
        **options: passed to `wandb.init`, such as `entity` or `mode`.

    Example:
        run = Run(..., trackers=(WandB(project="gpt", entity="my-team"),))
    """

    name = "wandb"
    rewinds = False

    def __init__(self, project: str | None = None, **options: object):
        self.project = project
        self.options = options

    def start(self, run: TrackedRun) -> str:
        """Open or resume a run of Weights & Biases."""
        # By default the library reports its internal errors to its vendor.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        options = dict(self.options)
        is_mode_set = bool(os.environ.get("WANDB_MODE")) or "mode" in options
        if not is_mode_set and not wandb.login(prompt=False, verify=False):
            options["mode"] = "offline"
        self._html = wandb.Html
        self._run = wandb.init(
            project=self.project or os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id or uuid.uuid4().hex[:12],
            resume="allow",
            dir=run.directory,
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
            **options,
        )
        return str(self._run.id)

    def log(self, records: Sequence[Record]) -> None:
        """Log the values of each step."""
        for step, values in records:
            self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Log a text as preformatted HTML."""
        page = self._html(f"<pre>{html.escape(text)}</pre>", inject=False)
        self._run.log({name: page}, step=step)

    def finish(self, exit_code: int) -> None:
        """Mark the run as finished with this exit code."""
        self._run.finish(exit_code=exit_code)
