"""Prompts in the tiny target's language."""

from random import Random

from tests.tiny.build import SEED
from tests.tiny.language import closing_sentence, document, make_language


def beginnings(count: int, seed: int = 1) -> list[str]:
    """`count` beginnings of documents, 3 to 40 words each, cut between words."""
    language, rng = make_language(SEED), Random(seed)
    return [" ".join(document(language, rng).split(" ")[: rng.randint(3, 40)]) for _ in range(count)]


def ending() -> str:
    """A text that the target, greedy or not, completes within 5 tokens and then ends: every draft foresees the end."""
    language = make_language(SEED)
    text = document(language, Random(3)).removesuffix(closing_sentence(language))
    return text + language.spelled(language.closing[0])
