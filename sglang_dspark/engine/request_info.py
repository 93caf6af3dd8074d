"""What an answer's meta_info says of its own verification, beside SGLang's figures.

SGLang's spec_num_proposed_drafts and spec_accept_rate count the server's full depth in every step. Under a schedule
that says little: here stands how many drafts of the request the target saw, and the share of them that it accepted.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.engine.server_args import asks_for_dspark


def describe(server_args: Any, meta_info: dict[str, Any]) -> None:
    """On a DSPARK server: :func:`add_verified`."""
    if asks_for_dspark(server_args):
        add_verified(meta_info)


def add_verified(meta_info: dict[str, Any]) -> None:
    """Add ``spec_num_verified_drafts`` and, where there were any, ``spec_verified_accept_rate``, in place.

    From SGLang's histogram of the lengths sent to the target, each a step's anchor and drafts; without one, nothing.
    """
    sent = meta_info.get("spec_cap_lens_histogram")
    if not sent:
        return
    verified = sum((length - 1) * steps for length, steps in enumerate(sent) if length)
    meta_info["spec_num_verified_drafts"] = verified
    if verified:
        meta_info["spec_verified_accept_rate"] = meta_info["spec_num_correct_drafts"] / verified
