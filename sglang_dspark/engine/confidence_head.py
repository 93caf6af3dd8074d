"""The trained confidence head of a server, where its draft has one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sglang_dspark.confidence.head import HEAD_FILE, ConfidenceHead, read_head
from sglang_dspark.config import Options, Refusal

logger = logging.getLogger(__name__)


def find_head(options: Options, draft: str | None, ranks: int) -> Path | None:
    """The head that the options name, or the one in the draft's folder; None where there is none to use.

    Under tensor parallelism a rank holds a part of the embedding only, and the estimator takes the head's place.
    """
    if options.head == "off":
        return None
    path = options.head or Path(draft or "") / HEAD_FILE
    if options.head is None and not path.is_file():
        return None
    if ranks > 1:
        logger.warning("DSPARK: %s is not used with --tp-size above 1; confidence comes from the estimator.", path)
        return None
    return path


def check_head(path: Path | None, hidden: int) -> None:
    """Before weights load.

    Raises:
        Refusal: there is a head, and it is damaged or for another draft.
    """
    if path is None:
        return
    try:
        read_head(path, hidden=hidden, width=hidden)
    except (OSError, ValueError) as error:
        raise Refusal(f"The confidence head cannot be used ({error}); or set DSPARK_CONFIDENCE_HEAD=off.") from None


def load_head(path: Path | None, target: Any) -> ConfidenceHead | None:
    """The head, over the target's token embedding, which EAGLE drafts share."""
    if path is None:
        return None
    embed = target.get_embed_and_head()[0]
    head = ConfidenceHead.load(path, hidden=embed.shape[1], embed=embed)
    logger.info("DSPARK: confidence from the trained head %s.", path)
    return head.requires_grad_(False)
