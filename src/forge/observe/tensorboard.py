"""Metrics as TensorBoard event files, written without torch."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.observe.sink import Value, closed_error


class TensorBoardSink:
    """Writes one event file. Numbers become scalars, texts become text.

    A run that resumes at `resume_step` starts a file of its own, which tells TensorBoard to forget the later steps of
    the files before it; without `resume_step` the run is new and TensorBoard forgets all of them. Nothing is deleted.
    Each write goes through to the operating system at once and fails at once: there is no thread behind it.
    """

    def __init__(self, folder: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads a folder's files in the order of their names, so names go up with time.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(open(self.folder / name, "xb"))  # noqa: SIM115 - see close()
        first_step = 0 if resume_step is None else resume_step + 1
        self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._put(Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._records.closed:
            raise closed_error(self)
        entries = [
            _text(name, value) if isinstance(value, str) else _scalar(name, value) for name, value in values.items()
        ]
        self._put(Event(wall_time=time.time(), step=step, summary=Summary(value=entries)))

    def close(self) -> None:
        self._records.close()

    def _put(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def _scalar(name: str, value: float) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary.Value(tag=name, simple_value=float(value))


def _text(name: str, value: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    plugin = SummaryMetadata.PluginData(plugin_name="text")
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    content = TensorProto(dtype="DT_STRING", string_val=[value.encode("utf-8", "backslashreplace")], tensor_shape=shape)
    return Summary.Value(tag=name, metadata=SummaryMetadata(plugin_data=plugin), tensor=content)
