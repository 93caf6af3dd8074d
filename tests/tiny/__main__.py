"""`python -m tests.tiny [OUT_DIR]`: build the tiny models and print where they are, as JSON."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from tests.tiny.build import DEFAULT_FOLDER, build


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tiny", description=__doc__)
    parser.add_argument("out_dir", nargs="?", type=Path, default=DEFAULT_FOLDER, help="default: %(default)s")
    pairs = build(parser.parse_args().out_dir)
    print(json.dumps({name: str(path) for name, path in asdict(pairs).items()}, indent=1))


if __name__ == "__main__":
    main()
