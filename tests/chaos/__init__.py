"""Thousands of requests at a server whose scheduler fails: `make chaos`."""

import tests.conftest  # noqa: F401 (the CPU engine's environment, before anything imports SGLang)
