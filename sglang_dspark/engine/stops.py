"""Stop strings inside a verified run: the one that is said first ends the request, as in plain decoding.

SGLang 0.5.23 looks for stop strings in a whole accepted run at once: of two in it, it takes the one that stands first
in the request's list, and one behind a stop token counts as if it had been said before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def finish_token_by_token(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """SGLang's Req.update_finish_state, told of the run's tokens one after the other where a stop string may end it.

    Under a grammar the run is looked at whole, as it is SGLang's grammar state, which has seen all of it.
    """
    params = req.sampling_params
    looks = params.stop_strs or params.stop_regex_strs
    if new_accepted_len < 2 or not looks or req.grammar is not None or req.finished() or req.to_finish:
        original(req, new_accepted_len)
        return
    said = req.output_ids
    try:
        for end in range(len(said) - new_accepted_len + 1, len(said) + 1):
            req.output_ids = said[:end]
            original(req, 1)
            said[end - 1] = req.output_ids[-1]  # a token that is none is replaced
            if req.finished():
                req.finished_len = end if req.finished_len is None else req.finished_len
                return
    finally:
        req.output_ids = said
