"""Confidence-scheduled speculative decoding (arXiv 2607.05147) for stock SGLang: the DSPARK algorithm for any draft."""

__version__ = "0.1.0"
