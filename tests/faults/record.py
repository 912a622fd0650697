"""Counts of long runs into a file of docs/results, in the form in which those are kept."""

import json
from pathlib import Path
from typing import Any


def record(path: Path, table: str, rows: list[dict[str, Any]]) -> None:
    """Replaces one table of a file; the others stay as they are."""
    content = json.loads(path.read_text("utf-8"))
    content[table] = rows
    path.write_text(to_text(content), "utf-8")


def to_text(content: dict[str, Any]) -> str:
    """JSON with a line for each row."""

    def block(value: Any) -> str:
        if isinstance(value, list) and value:
            return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        return json.dumps(value, indent=1).replace("\n", "\n ")

    parts = [f" {json.dumps(name)}: {block(value)}" for name, value in content.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"
