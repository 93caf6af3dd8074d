"""The chain sampler keeps the target's distribution under every cut of the chain, and filters as SGLang's plain one."""

import pytest
import torch
from scipy.stats import chisquare

from sglang_dspark.engine.sampling import chain_sample, filter_cpu, filter_min_p, inverse_cdf

ROWS, VOCAB, WIDTH = 200_000, 5, 4


@pytest.fixture
def random():
    return torch.Generator().manual_seed(5)


def tables(random):
    """A target and a draft that are first-order Markov chains: [V, V] row-stochastic each."""
    return (torch.softmax(1.5 * torch.randn(VOCAB, VOCAB, generator=random), -1) for _ in range(2))


def draw(weights, random):
    return torch.multinomial(weights, 1, generator=random).squeeze(1)


@pytest.mark.parametrize("rule", ("argmax", "sampled"))
@pytest.mark.parametrize("verified", (0, 1, 2, 3))
def test_the_first_two_tokens_have_the_targets_distribution(random, rule, verified):
    target, draft = tables(random)
    candidates = torch.zeros(ROWS, WIDTH, dtype=torch.long)
    for j in range(1, WIDTH):
        weights = draft[candidates[:, j - 1]]
        candidates[:, j] = weights.argmax(-1) if rule == "argmax" else draw(weights, random)
    probs = target[candidates]
    proposals = draft[candidates[:, :-1]] if rule == "sampled" else None
    if proposals is not None:
        proposals[:, verified:] = 0
    follows = (torch.arange(WIDTH) < verified).expand(ROWS, WIDTH)
    coins, last_coins = torch.rand(ROWS, WIDTH, generator=random), torch.rand(ROWS, generator=random)
    accepted, token = chain_sample(probs, candidates, follows, proposals, coins, last_coins)

    assert accepted.max() == verified and accepted.min() == 0
    first = torch.where(accepted > 0, candidates[:, 1], token)
    assert p_value(first, target[0]) > 1e-4
    # The second token, where the step produced one; given the first it follows the target as well.
    both = accepted > 0
    second = torch.where(accepted > 1, candidates[:, 2], token)
    for x in range(VOCAB):
        rows = both & (first == x)
        if rows.sum() > 1000:
            assert p_value(second[rows], target[x]) > 1e-4


def p_value(tokens, weights):
    observed = torch.bincount(tokens, minlength=VOCAB).numpy()
    expected = (weights.double() / weights.double().sum() * len(tokens)).numpy()
    return chisquare(observed, expected * observed.sum() / expected.sum()).pvalue


def test_a_residual_at_a_cut_would_be_biased(random):
    """Why a cut chain samples from the target: from max(p - q, 0), as after a rejection, the distribution is wrong."""
    target, draft = tables(random)
    candidates = torch.zeros(ROWS, 2, dtype=torch.long)
    candidates[:, 1] = draw(draft[candidates[:, 0]], random)
    coins = torch.full((ROWS, 2), 1 - 2**-24)  # refuses the draft, as if it had been verified
    _, token = chain_sample(
        target[candidates], candidates, torch.ones(ROWS, 2, dtype=torch.bool), draft[candidates[:, :-1]], coins,
        torch.rand(ROWS, generator=random),
    )  # fmt: skip
    assert p_value(token, target[0]) < 1e-4


def test_inverse_cdf_never_returns_a_token_of_weight_zero():
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).repeat(4, 1)
    coins = torch.tensor([0.0, 0.3, 0.299999, 1.0 - 2**-24])
    assert inverse_cdf(weights, coins).tolist() == [1, 3, 1, 3]


def test_filters_leave_unlimited_rows_alone_and_make_greedy_rows_certain():
    probs = torch.tensor([[[0.5, 0.2, 0.2, 0.1]], [[0.1, 0.2, 0.3, 0.4]], [[0.4, 0.3, 0.2, 0.1]]])
    top_ks, top_ps = torch.tensor([1 << 30, 1, 1 << 30]), torch.tensor([1.0, 1.0, 0.6])
    got = filter_cpu(probs.clone(), top_ks, top_ps, None)
    assert torch.equal(got[0], probs[0])
    assert got[1].tolist() == [[0, 0, 0, 1]]
    assert torch.allclose(got[2], torch.tensor([[4 / 7, 3 / 7, 0, 0]]))


def test_top_p_counts_on_the_whole_distribution_and_min_p_on_what_is_largest():
    probs = torch.tensor([[[0.4, 0.3, 0.2, 0.1]]])
    limits = torch.tensor([3]), torch.tensor([0.65]), torch.tensor([0.8])
    assert torch.allclose(filter_cpu(probs.clone(), *limits[:2], None), torch.tensor([[[4 / 7, 3 / 7, 0, 0]]]))
    assert filter_cpu(probs.clone(), *limits).tolist() == [[[1, 0, 0, 0]]]
    assert torch.allclose(filter_min_p(probs, torch.tensor([0.6])), torch.tensor([[[4 / 7, 3 / 7, 0, 0]]]))
