"""What each kind of request must be answered with: by plain decoding, once for each prompt."""

from concurrent.futures import ThreadPoolExecutor

from benchmarks.launch import Server
from tests.engine import asks
from tests.engine.asks import ENDLESS, ask, same
from tests.engine.conftest import make_prompts

# Input log-probabilities depend on what the radix cache holds, so that only those of the output are asked for here.
ASKS = {
    **asks.ASKS,
    "logprobs": {"sampling_params": ENDLESS, "return_logprob": True, "top_logprobs_num": 2},
    "sampled": {"sampling_params": {**ENDLESS, "temperature": 0.8, "top_p": 0.9}},
}


class Answers:
    """Prompts, and the greedy answer to each kind of request for each of them."""

    def __init__(self, plain: Server) -> None:
        self.prompts = make_prompts()
        todo = [(kind, i) for kind in ASKS if kind != "sampled" for i in range(len(self.prompts))]
        with ThreadPoolExecutor(64) as pool:
            found = pool.map(lambda it: ask(plain, self.prompts[it[1]], ASKS[it[0]]), todo)
            self._answers = dict(zip(todo, found, strict=True))

    def of(self, kind: str, prompt: int) -> dict | list | None:
        """None where any answer is right."""
        return self._answers.get((kind, prompt))


def right(wanted: dict | list | None, got: dict | list, length: int | None, whole: bool) -> bool:
    """Whether ``got`` is the answer: of ``length`` tokens where one was asked for, a beginning where not ``whole``."""
    if isinstance(got, dict) and "output_ids" not in got:
        return not whole  # aborted before it had begun
    if wanted is None:
        assert isinstance(got, dict)
        return not whole or len(got["output_ids"]) == length
    if not whole or length is not None:
        pairs = zip(got, wanted, strict=True) if isinstance(wanted, list) else [(got, wanted)]
        tokens = [(g["output_ids"], w["output_ids"]) for g, w in pairs]
        return all(g == w[: len(g)] and (not whole or len(g) == length) for g, w in tokens)
    return same(got, wanted)
