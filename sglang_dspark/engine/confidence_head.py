"""The trained confidence head of a server, where its draft has one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sglang_dspark.confidence import HEAD, HEADLESS, Source
from sglang_dspark.confidence.head import HEAD_FILE, ConfidenceHead, read_head
from sglang_dspark.config import Options, Refusal

logger = logging.getLogger(__name__)


def find_head(options: Options, draft: str | None) -> Path | None:
    """The head that the options name, or the one in the draft's folder; None where there is none."""
    if options.head == "off":
        return None
    if options.head is not None:
        return options.head
    beside = Path(draft or "") / HEAD_FILE
    return beside if beside.is_file() else None


def source_of(options: Options, draft: str | None, ranks: int) -> Source:
    """Where confidence comes from: under tensor parallelism never from a head."""
    return HEADLESS if ranks > 1 or find_head(options, draft) is None else HEAD


def check_head(options: Options, draft: str | None, hidden: int) -> None:
    """Before weights load.

    Raises:
        Refusal: there is a head, and it is damaged or for another draft.
    """
    path = find_head(options, draft)
    if path is None:
        return
    try:
        read_head(path, hidden=hidden, width=hidden)
    except (OSError, ValueError) as error:
        raise Refusal(f"The confidence head cannot be used ({error}); or set DSPARK_CONFIDENCE_HEAD=off.") from None


def load_head(options: Options, draft: str | None, target: Any, ranks: int) -> ConfidenceHead | None:
    """The head, over the target's token embedding, which EAGLE drafts share; None where there is none to use.

    Under tensor parallelism a rank holds a part of the embedding only, and the estimator takes the head's place.
    """
    path = find_head(options, draft)
    if path is not None and ranks > 1:
        logger.warning("DSPARK: %s is not used with --tp-size above 1; confidence comes from the estimator.", path)
        return None
    if path is None:
        return None
    embed = target.get_embed_and_head()[0]
    head = ConfidenceHead.load(path, hidden=embed.shape[1], embed=embed)
    logger.info("DSPARK: confidence from the trained head %s.", path)
    return head.requires_grad_(False)
