"""Subcommands of `sglang-dspark`, one module each."""
