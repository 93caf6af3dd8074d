"""A tree of the installed SGLang that a test may change: links, and copies of the files that our patches touch."""

import shutil
from pathlib import Path

from sglang_dspark.patches import find_tree, open_tree


def link_tree(folder: Path) -> Path:
    """``folder``/sglang; with ``folder`` first on PYTHONPATH it is what runs."""
    installed, tree = find_tree(None), folder / "sglang"
    copied = {Path(file.path) for patch in open_tree(installed).patches for file in patch.files}
    opened = {parent for path in copied for parent in path.parents}
    for parent in sorted(opened):
        (tree / parent).mkdir(parents=True, exist_ok=True)
        for entry in (installed / parent).iterdir():
            path = parent / entry.name
            if path in copied:
                shutil.copy2(entry, tree / path)
            elif path not in opened and entry.name != "__pycache__":
                (tree / path).symlink_to(entry)
    return tree
