"""The fixtures of the engine tests, for the conditions that need a server."""

from tests.engine.conftest import expected, pairs, plain, prompts, resolve, switch

__all__ = ["expected", "pairs", "plain", "prompts", "resolve", "switch"]
