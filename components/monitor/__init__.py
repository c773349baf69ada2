"""What a run reports: metrics, progress, rollouts, a summary and one picture.

`build_monitor` wires the sinks a config asks for; `Monitor` is what the driver calls. `leeway.monitor.curves`
(matplotlib) and the sinks of other packages are imported only when used, so that importing this package stays cheap.
"""

from .build import build_monitor, own_sinks
from .jsonl import read_metrics
from .monitor import Monitor
from .sink import MonitorError, Record, Sink
from .summary import reward_first, reward_last, weights_sha256, write_summary

__all__ = [
    "Monitor",
    "MonitorError",
    "Record",
    "Sink",
    "build_monitor",
    "own_sinks",
    "read_metrics",
    "reward_first",
    "reward_last",
    "weights_sha256",
    "write_summary",
]
