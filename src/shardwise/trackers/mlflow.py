"""The tracker for MLflow."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from shardwise.errors import ExitCode
from shardwise.trackers.base import PROJECT, Record, TrackedRun

# Limits of MLflow: metrics and parameters in one call, characters of a parameter.
MAX_METRICS = 1000
MAX_PARAMS = 100
MAX_PARAM_LENGTH = 500


class MLflow:
    """Logs to MLflow, in the store that its own settings name.

    Args:
        tracking_uri: the store; `MLFLOW_TRACKING_URI` if None, and without that a database in the
            working directory.
        experiment: the experiment; `MLFLOW_EXPERIMENT_NAME` or "shardwise" if None.

    Example:
        run = Run(..., trackers=(MLflow("sqlite:///mlflow.db"),))
    """

    name = "mlflow"
    rewinds = False

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None):
        self.tracking_uri = tracking_uri
        self.experiment = experiment

    def start(self, run: TrackedRun) -> str:
        """Create a run of MLflow, or reopen the run `run.id`."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client = client = MlflowClient(self.tracking_uri)
        if run.id is not None:
            # If the run is in another store or has been deleted, a new one is created below.
            with suppress(MlflowException):
                client.update_run(run.id, status="RUNNING")
                self._id = run.id
                return run.id
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        existing = client.get_experiment_by_name(name)
        experiment_id = (
            existing.experiment_id if existing else client.create_experiment(name)
        )
        self._id = str(client.create_run(experiment_id, run_name=run.name).info.run_id)
        params = [
            Param(key, str(value)[:MAX_PARAM_LENGTH])
            for key, value in _flatten(run.config).items()
        ]
        client.log_batch(self._id, params=params[:MAX_PARAMS])
        return self._id

    def log(self, records: Sequence[Record]) -> None:
        """Log the values of all steps in batches."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now, step)
            for step, values in records
            for name, value in values.items()
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(
                self._id, metrics=metrics[start : start + MAX_METRICS]
            )

    def text(self, step: int, name: str, text: str) -> None:
        """Store a text as the artifact `NAME/STEP.txt`."""
        self._client.log_text(self._id, text, f"{name}/{step}.txt")

    def finish(self, exit_code: int) -> None:
        """Set the final status of the run."""
        statuses: dict[int, str] = {
            ExitCode.DONE: "FINISHED",
            ExitCode.STOPPED: "KILLED",
        }
        self._client.set_terminated(self._id, statuses.get(exit_code, "FAILED"))


def _flatten(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested mappings as one, with keys such as "versions/jax"."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
