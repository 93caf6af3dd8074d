"""What a server leaves behind for people and tools: the step trace."""

from sglang_dspark.observe.trace import Trace, TraceWriter, read_trace

__all__ = ["Trace", "TraceWriter", "read_trace"]
