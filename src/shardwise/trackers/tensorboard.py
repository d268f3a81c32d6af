"""The tracker for TensorBoard."""

import json
import time
from collections.abc import Sequence

from shardwise.files.paths import AnyPath
from shardwise.trackers.base import Record, TrackedRun


class TensorBoard:
    """Writes event files for TensorBoard.

    Args:
        directory: where to write; `RUN/tensorboard` if None.

    Example:
        run = Run(..., trackers=(TensorBoard(),))
    """

    name = "tensorboard"
    rewinds = True

    def __init__(self, directory: AnyPath | None = None):
        self.directory = directory

    def start(self, run: TrackedRun) -> str:
        """Open an event file in the directory."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(
            str(self.directory or run.directory / "tensorboard")
        )
        if run.id is None:
            self.text(run.step, "config", json.dumps(run.config, indent=2, default=str))
        else:
            # Readers drop what an earlier start wrote of the steps from here on.
            log = SessionLog(status=SessionLog.START)
            event = Event(wall_time=time.time(), step=run.step + 1, session_log=log)
            self._writer.add_event(event)
        return "tensorboard"

    def log(self, records: Sequence[Record]) -> None:
        """Write one scalar summary per step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for step, values in records:
            scalars = [
                Summary.Value(tag=name, simple_value=value)
                for name, value in values.items()
            ]
            self._add(step, Summary(value=scalars))
        self._writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text summary, indented so that TensorBoard shows it verbatim."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        # TensorBoard renders texts as Markdown, where an indented block is code.
        indented = "\n".join("    " + line for line in text.splitlines())
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        content = [indented.encode(errors="replace")]
        tensor = TensorProto(dtype=DT_STRING, string_val=content, tensor_shape=shape)
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        metadata = SummaryMetadata(plugin_data=plugin)
        self._add(
            step,
            Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)]),
        )

    def finish(self, exit_code: int) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _add(self, step: int, summary: object) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
