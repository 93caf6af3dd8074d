"""Stand-in for sgl_kernel.mamba: its names can be imported, so that SGLang's linear-attention modules load."""

from sgl_kernel import __getattr__

__all__ = ["__getattr__"]
