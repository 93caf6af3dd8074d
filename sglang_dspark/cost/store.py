"""Saves a cost table under the deployment it was measured on, and refuses one that was measured on another."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sglang_dspark.cost.table import CostTable
from sglang_dspark.files import written_whole

FORMAT = "sglang-dspark-cost/2"


@dataclass(frozen=True)
class CostKey:
    """What a cost table holds for. Every field must be equal for a saved table to be used."""

    model: str
    draft: str
    dtype: str
    device: str  # device name; on a CPU with its thread count, which changes everything
    backend: str  # attention backend of the verify pass
    tp: int
    dp: int
    ep: int
    sglang: str


def save_table(path: str | Path, key: CostKey, table: CostTable) -> None:
    """Writes the table as JSON, atomically and readable by the owner only."""
    text = json.dumps({"format": FORMAT, "key": asdict(key), "table": asdict(table)}, indent=1, allow_nan=False)
    with written_whole(Path(path)) as file:
        file.write_text(text + "\n", encoding="utf-8")


def load_table(path: str | Path, key: CostKey) -> CostTable:
    """Reads a table back. Raises ValueError, one sentence, where the file is damaged or for another deployment."""
    found, table = read_table(path)
    for name, wanted in asdict(key).items():
        if found.get(name) != wanted:
            raise ValueError(
                f"Cost table {path} was measured with {name} {found.get(name)!r}, not {wanted!r}; "
                "delete it or name another file to profile again."
            )
    return table


def read_table(path: str | Path) -> tuple[dict[str, Any], CostTable]:
    """What a table was measured on, and the table. Raises ValueError, one sentence, where the file is damaged."""
    content = _read_object(path)
    if content.get("format") != FORMAT:
        raise ValueError(
            f"Cost table {path} has format {content.get('format')!r} where {FORMAT!r} is needed; "
            "delete it to profile again."
        )
    found = content.get("key")
    if not isinstance(found, dict):
        raise ValueError(f"Cost table {path} does not say what it was measured on; delete it to profile again.")
    return found, _table(path, content.get("table"))


def _read_object(path: str | Path) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"Cost table {path} cannot be read as JSON ({error}); delete it to profile again, or name another file."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"Cost table {path} holds a {type(content).__name__} where a JSON object is needed.")
    return content


def _table(path: str | Path, values: Any) -> CostTable:
    names = {field.name for field in fields(CostTable)}
    if not isinstance(values, dict) or set(values) != names:
        raise ValueError(f"Cost table {path} must have exactly the fields {', '.join(sorted(names))}.")
    sequences: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    try:
        return CostTable(**sequences)
    except (TypeError, ValueError) as error:
        why = str(error).rstrip(".")
        raise ValueError(f"Cost table {path} is damaged ({why}); delete it to profile again.") from error
