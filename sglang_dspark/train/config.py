"""config.json of a model's folder: reading it, and what it asks for that the trainer does not compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `folder/config.json`.

    Raises:
        ValueError: it is no JSON object.
        OSError: of the system, where there is none.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); fetch the model again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object; fetch the model again")
    return config


def other_options(config: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """`name value` of each option of `plain` that `config` sets to another value; not set or null is plain."""
    return [f"{name} {config[name]!r}" for name, value in plain.items() if config.get(name) not in (None, value)]


def scaled_rope(config: dict[str, Any]) -> list[str]:
    """`name value` of each rotary scaling, which transformers 5 writes elsewhere than those before it."""
    kinds = {}
    for place in ("rope_parameters", "rope_scaling"):
        rope = config.get(place) or {}
        kinds[place] = rope.get("rope_type", rope.get("type", "default"))
    return [f"{place} {kind!r}" for place, kind in kinds.items() if kind != "default"]
