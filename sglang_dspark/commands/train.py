"""`sglang-dspark train`: a draft and its confidence head from prompts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_train(commands: Any) -> Callable[[argparse.Namespace], int]:
    """`train`: a chain draft and its confidence head for a Llama target, from prompts alone."""
    parser = commands.add_parser(
        "train", help="train an EAGLE3 draft and its confidence head for a Llama target from a set of prompts"
    )
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder of the target")
    parser.add_argument(
        "--prompts", type=Path, required=True, help='JSONL file, or folder of them: {"turns": ["first message", ...]}'
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the draft, metrics.json and fit.png")
    parser.add_argument("--work", type=Path, default=Path("build/train"), help="folder for generated data (GBs)")
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--left-out", type=float, default=0.15, help="fraction of prompts kept for measuring")
    parser.add_argument("--max-prompt-tokens", type=int, default=576, help="longer prompts are left aside")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--sampled-share", type=float, default=0.3, help="share of prompts answered at 0.8 too")
    parser.add_argument("--batches", type=int, help="generate only the first BATCHES batches of the seeded plan")
    parser.add_argument(
        "--variations",
        type=int,
        default=0,
        metavar="BATCHES",
        help="batches of dialogues that the target writes itself from the prompts' opening words",
    )
    parser.add_argument("--variations-seed", type=int, help="other dialogues than another run's (default: --seed)")
    parser.add_argument(
        "--head-only", type=Path, metavar="DRAFT_FOLDER", help="leave this draft as it is and train its head alone"
    )
    parser.add_argument(
        "--start-from", type=Path, metavar="DRAFT_FOLDER", help="go on from this draft, not from the target's layers"
    )
    parser.add_argument(
        "--known-batches",
        type=int,
        default=0,
        help="the first batches, which that draft was fitted to: drawn less often",
    )
    parser.add_argument(
        "--known-share",
        type=float,
        default=0.25,
        help="share of those that is drawn in each epoch, beside all the rest",
    )
    parser.add_argument(
        "--head-batches",
        type=int,
        metavar="BATCHES",
        help="the last batches, kept from the draft to train its head (default: a fifth)",
    )
    parser.add_argument("--draft-vocab", type=int, default=4864, help="tokens the draft can propose")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--answers-per-step", type=int, default=8, help="answers in an optimiser step")
    parser.add_argument("--rollout-steps", type=int, default=4, help="draft steps trained on")
    parser.add_argument("--prompt-share", type=float, default=0.5, help="share of the prompts' tokens trained on, too")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak of the cosine")

    def run(args: argparse.Namespace) -> int:
        from sglang_dspark.train.fit import Fitting
        from sglang_dspark.train.generate import Generation
        from sglang_dspark.train.pipeline import Recipe, train
        from sglang_dspark.train.variations import Variations

        recipe = Recipe(
            target=args.target,
            prompts=args.prompts,
            out=args.out,
            work=args.work,
            workers=args.workers,
            left_out=args.left_out,
            generation=Generation(
                seed=args.seed,
                max_prompt_tokens=args.max_prompt_tokens,
                max_new_tokens=args.max_new_tokens,
                answers=((0.0, 1.0), (0.8, args.sampled_share)),
                batches=args.batches,
            ),
            variations=Variations(
                batches=args.variations,
                seed=args.seed if args.variations_seed is None else args.variations_seed,
                max_new_tokens=args.max_new_tokens,
            ),
            fitting=Fitting(
                seed=args.seed,
                draft_vocab=args.draft_vocab,
                epochs=args.epochs,
                answers_per_step=args.answers_per_step,
                steps=args.rollout_steps,
                learning_rate=args.learning_rate,
                prompt_share=args.prompt_share,
                known_share=args.known_share,
            ),
            start=args.start_from,
            known=args.known_batches,
            frozen=args.head_only,
            held=args.head_batches,
        )
        print(json.dumps(train(recipe)["accepted_length"], indent=2))
        return 0

    parser.set_defaults(run=run)
    return run
