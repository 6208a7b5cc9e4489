"""What a run reports: metrics and where they go, how fast it is, and how fast it could be.

    with make_sinks(config.metrics, folder=folder, total_steps=1000) as log:
        log.write(step, step_values(result, epoch=1, tokens_per_s=meter.tokens_per_s))

Any process of a run notes metrics with `record_metric` and traces what it does with `span`; the loop brings them
together with `forge.runtime.collect.collect`, and writes the spans to a `TraceFile`.

Importing this loads neither torch nor any of the packages that the sinks write with.
"""

from forge.observe.console import ConsoleSink
from forge.observe.jsonl import JsonlSink, MetricsLine, read_jsonl
from forge.observe.log import MetricsLog, make_sinks
from forge.observe.logs import start_logging
from forge.observe.metrics import Reduce, record_metric
from forge.observe.sink import Sink, Value
from forge.observe.tensorboard import TensorBoardSink
from forge.observe.throughput import Throughput, device_peak_flops, step_values
from forge.observe.trace_file import TraceFile
from forge.observe.tracing import Span, is_tracing, span, switch_tracing
from forge.observe.wandb import WandbSink

__all__ = [
    "ConsoleSink",
    "JsonlSink",
    "MetricsLine",
    "MetricsLog",
    "Reduce",
    "Sink",
    "Span",
    "TensorBoardSink",
    "Throughput",
    "TraceFile",
    "Value",
    "WandbSink",
    "device_peak_flops",
    "is_tracing",
    "make_sinks",
    "read_jsonl",
    "record_metric",
    "span",
    "start_logging",
    "step_values",
    "switch_tracing",
]
