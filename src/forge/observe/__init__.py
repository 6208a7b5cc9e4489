"""What a run reports: figures and where they go, how fast it is, and how fast it could be.

    with make_sinks(config.metrics, folder=folder, total_steps=1000) as log:
        log.write(step, step_values(result, epoch=1, tokens_per_s=meter.tokens_per_s))

Importing this loads neither torch nor any of the packages that the sinks write with.
"""

from forge.observe.console import ConsoleSink
from forge.observe.devices import device_peak_flops
from forge.observe.flops import (
    flops_per_token,
    mean_context,
    model_flops_utilization,
    num_active_parameters,
    num_parameters,
)
from forge.observe.jsonl import JsonlSink, MetricsLine, read_jsonl
from forge.observe.log import MetricsLog, make_sinks
from forge.observe.sink import Sink, Value
from forge.observe.tensorboard import TensorBoardSink
from forge.observe.throughput import Throughput, step_values
from forge.observe.wandb import WandbSink

__all__ = [
    "ConsoleSink",
    "JsonlSink",
    "MetricsLine",
    "MetricsLog",
    "Sink",
    "TensorBoardSink",
    "Throughput",
    "Value",
    "WandbSink",
    "device_peak_flops",
    "flops_per_token",
    "make_sinks",
    "mean_context",
    "model_flops_utilization",
    "num_active_parameters",
    "num_parameters",
    "read_jsonl",
    "step_values",
]
