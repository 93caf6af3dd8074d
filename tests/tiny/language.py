"""A synthetic language whose next token is certain inside words, skewed between them and tied to text far back.

Sentences open with one of three mood words. A word's likeliest successor is set by the mood, so a reader must look
back to the opener; each mood's successors form one long cycle, so always taking the likeliest word does not loop soon.
A document ends with a fixed closing sentence and the end token: an end that drafts can foresee.
"""

from dataclasses import dataclass
from random import Random

CONSONANTS = "bdfgklmnprst"
VOWELS = "aeiou"
SYLLABLES = [c + v for c in CONSONANTS for v in VOWELS]
MOODS = 3
# Between two moods' cycles, a third and a fourth candidate: a branch has entropy 1.6 bits and its best word is right 6
# times in 10, which is where drafts are mostly refused.
SUCCESSOR_ODDS = (0.60, 0.20, 0.12, 0.08)
CLOSING_ODDS = 0.2
COMMA_EVERY = 7  # every seventh word of the lexicon drags a comma behind it, always


@dataclass(frozen=True)
class Language:
    """Words and the tables that say which word follows which.

    words: tuple of syllable tuples. openers, closing: word indices with a role. successors[mood][word]: four word
    indices, likeliest first. regular: indices of the words that make up sentences.
    """

    words: tuple[tuple[str, ...], ...]
    openers: tuple[int, ...]
    closing: tuple[int, ...]
    regular: tuple[int, ...]
    successors: tuple[dict[int, tuple[int, ...]], ...]

    def spelled(self, word: int) -> str:
        return "".join(self.words[word])


def make_language(seed: int, lexicon: int = 48) -> Language:
    """Draw a language: `lexicon` regular words of 2 to 4 syllables, none a prefix of another."""
    rng = Random(seed)
    first = rng.sample(SYLLABLES, 30)  # fewer first syllables than words: some words share their beginning
    words: list[tuple[str, ...]] = []
    while len(words) < lexicon + MOODS + 3:
        length = rng.choices((2, 3, 4), (0.35, 0.4, 0.25))[0]
        word = (rng.choice(first), *rng.sample(SYLLABLES, length - 1))
        if not any(word[: len(w)] == w or w[: len(word)] == word for w in words):
            words.append(word)
    regular = tuple(range(lexicon))
    cycles = []
    for _ in range(MOODS):
        order = list(regular)
        rng.shuffle(order)
        cycles.append({w: order[(i + 1) % lexicon] for i, w in enumerate(order)})
    shared = {w: tuple(rng.sample(regular, 2)) for w in regular}
    successors = tuple(
        {w: (cycles[m][w], cycles[(m + 1) % MOODS][w], *shared[w]) for w in regular} for m in range(MOODS)
    )
    openers = tuple(range(lexicon, lexicon + MOODS))
    closing = tuple(range(lexicon + MOODS, lexicon + MOODS + 3))
    return Language(tuple(words), openers, closing, regular, successors)


def sentence(language: Language, mood: int, rng: Random) -> str:
    """One sentence in a mood, with its full stop and no space in front; moods differ in length too."""
    word = rng.choice(language.regular[:12])  # few words start sentences
    parts = [language.spelled(language.openers[mood])]
    for _ in range(5 + 2 * mood):
        parts.append(language.spelled(word) + ("," if word % COMMA_EVERY == 0 else ""))
        word = rng.choices(language.successors[mood][word], SUCCESSOR_ODDS)[0]
    return " ".join(parts).rstrip(",") + "."


def closing_sentence(language: Language) -> str:
    """The sentence after which a document always ends."""
    return " ".join(language.spelled(w) for w in language.closing) + "."


def document(language: Language, rng: Random) -> str:
    """Sentences until the closing one; the mood repeats with a lag of two sentences."""
    moods = [rng.randrange(MOODS), rng.randrange(MOODS)]
    sentences = [sentence(language, m, rng) for m in moods]
    while rng.random() > CLOSING_ODDS:
        moods.append((moods[-2] + 1) % MOODS)
        sentences.append(sentence(language, moods[-1], rng))
    sentences.append(closing_sentence(language))
    return " ".join(sentences)
