"""`sglang-dspark patch`: applies, checks and reverts our source patches of SGLang itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_patch(commands: Any) -> Callable[[argparse.Namespace], int]:
    """`patch`: what the hooks mend from outside, mended in SGLang's source."""
    parser = commands.add_parser(
        "patch",
        help="apply, check or revert source patches that mend gaps of SGLang",
        description="The patches are what we send upstream, each with its reason at its top. None is needed: where one "
        "is not in, a hook does the same from outside, and where it is in, the hook is left out. All are applied or "
        "reverted, or nothing is touched. Restart servers of that SGLang afterwards.",
    )
    parser.add_argument("action", choices=("apply", "check", "revert"))
    parser.add_argument("--tree", type=Path, help="an SGLang other than the one installed here")

    def run(args: argparse.Namespace) -> int:
        from sglang_dspark.patches import State, find_tree, open_tree

        patches = open_tree(find_tree(args.tree))
        if args.action != "check":
            done = patches.apply() if args.action == "apply" else patches.revert()
            print(f"{len(done)} patches {'applied to' if args.action == 'apply' else 'reverted in'} {patches.tree}.")
            return 0
        states = patches.states()
        print(f"{patches.tree}:")
        for name, state in states.items():
            print(f"{state.value:>8}  {name}")
        return int(State.CHANGED in states.values())

    parser.set_defaults(run=run)
    return run
