"""Sampled output follows the target's own distribution; the same test catches a scheduler that looks at sampled tokens.

Here drafts are the draft's argmax; test_sampling_drawn runs the same tests where they are drawn.
"""

from collections import Counter

import numpy as np
import pytest
import requests
import torch
from scipy.stats import chi2

from tests.engine.conftest import dspark, switched

PROMPT = [3, 7, 5]
TOKENS = 5  # the first comes from the prefill, the others from verify steps of depth 3
SAMPLES = 4_000
MANY = 24_000
ALPHA = 1e-4  # how often a right sampler fails a test
REJECTION = ("--speculative-use-rejection-sampling",)
LONG = pytest.mark.long
FILTERS = (
    {},
    {"top_k": 6, "top_p": 0.7, "min_p": 0.1, "temperature": 1.3},
    pytest.param({"temperature": 0.7}, marks=LONG),
    pytest.param({"top_k": 5}, marks=LONG),
    pytest.param({"top_p": 0.8}, marks=LONG),
    pytest.param({"min_p": 0.15}, marks=LONG),
)


@pytest.fixture(scope="module")
def switch(pairs, tmp_path_factory):
    with ruled(pairs.chi_target, pairs.chi_eagle3, tmp_path_factory.mktemp("policy")) as it:
        yield it


def ruled(target, draft, folder, *flags):
    """A server under the Switch policy, by whose answers all samples are drawn."""
    return switched(folder, target, draft, "--speculative-num-steps", "3", "--disable-radix-cache", *flags)


@pytest.fixture
def server(switch):
    return switch.to("own")


@pytest.fixture(scope="module")
def target(pairs):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(pairs.chi_target, dtype=torch.float32)


@pytest.mark.parametrize(
    "sampling", FILTERS, ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()) or "temperature=1"
)
def test_sampled_output_has_the_targets_distribution(server, target, sampling):
    before = server.info()["dspark"]
    found = sample(server, SAMPLES, **sampling)
    after = server.info()["dspark"]
    assert p_value(found, distribution(target, **sampling)) > ALPHA
    # It was really speculation that was tested: drafts were accepted, and others refused.
    accepted, verified = (after[k] - before.get(k, 0) for k in ("accepted", "verified"))
    assert 0.05 < accepted / verified < 0.95


@pytest.mark.parametrize("policy", ("rests", pytest.param("random", marks=LONG)))
def test_sampled_output_has_the_targets_distribution_at_every_depth_and_after_rests(switch, target, policy):
    assert p_value(sample(switch.to(policy), SAMPLES), distribution(target)) > ALPHA
    depths = switch.server.info()["dspark"]["depths"]
    assert policy == "random" or set(depths) == {"0", "1", "2", "3"}


@pytest.mark.long
def test_sampled_output_has_the_targets_distribution_in_many_samples(server, target):
    assert p_value(sample(server, MANY), distribution(target)) > ALPHA


def test_a_scheduler_that_looks_at_the_sampled_token_is_caught(pairs, target):
    peek = {"DSPARK_POLICY": "tests.engine.policies:Peek"}
    with dspark(pairs.chi_target, pairs.chi_eagle3, "--speculative-num-steps", "3", *REJECTION, env=peek) as server:
        assert p_value(sample(server, SAMPLES), distribution(target)) < ALPHA


def test_the_statistic_knows_right_from_wrong(target):
    expected = distribution(target)
    flat = expected.flatten()
    random = np.random.default_rng(0)

    def drawn(weights):
        draws = random.choice(len(flat), size=SAMPLES, p=weights / weights.sum())
        return Counter(zip(*(axis.tolist() for axis in np.unravel_index(draws, expected.shape)), strict=True))

    assert p_value(drawn(flat), expected) > ALPHA
    assert p_value(drawn(flat**1.1), expected) < ALPHA  # as if at temperature 0.91


def sample(server, count, **sampling):
    """Output sequences of ``count`` requests, drawn in calls of 1,000."""
    parameters = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True, **sampling}
    found = Counter()
    for start in range(0, count, 1000):
        body = {"input_ids": [PROMPT] * min(1000, count - start), "sampling_params": parameters}
        replies = requests.post(f"{server.url}/generate", json=body, timeout=600).json()
        found.update(tuple(reply["output_ids"]) for reply in replies)
    return found


@torch.no_grad()
def distribution(target, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """P(t1, ..., t5) by enumeration, [V] * TOKENS: the target's, under SGLang's plain CPU filters."""
    vocab = target.config.vocab_size
    prefixes, probability = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    for _ in range(TOKENS):
        logits = torch.cat([target(chunk).logits[:, -1] for chunk in prefixes.split(8192)])
        probs = filtered(torch.softmax(logits.double() / temperature, -1), top_k or vocab, top_p, min_p)
        probability = (probability[:, None] * probs).flatten()
        tokens = torch.arange(vocab).repeat(len(prefixes))
        prefixes = torch.cat([prefixes.repeat_interleave(vocab, 0), tokens[:, None]], 1)
    return probability.view(*[vocab] * TOKENS).numpy()


def filtered(probs, top_k, top_p, min_p):
    """Top-k and top-p on the whole distribution, then min-p against the largest, as SGLang's plain CPU sampler does."""
    ordered, index = probs.sort(-1, descending=True)
    ordered = ordered.clone()
    ordered[(ordered.cumsum(-1) - ordered > top_p) | (torch.arange(probs.shape[-1]) >= top_k)] = 0
    ordered[ordered < min_p * ordered[:, :1]] = 0
    kept = torch.zeros_like(probs).scatter(-1, index, ordered)
    return kept / kept.sum(-1, keepdim=True)


def p_value(found, expected):
    """Smallest chi-square p-value over the pairs of neighbouring tokens, times the number of pairs (Bonferroni).

    Cells that expect fewer than 5 are merged. A sequence that the target cannot produce gives 0.
    """
    total = sum(found.values())
    worst = 1.0
    for first in range(TOKENS - 1):
        others = tuple(axis for axis in range(TOKENS) if axis not in (first, first + 1))
        cells = expected.sum(axis=others) * total
        counts = np.zeros_like(cells)
        for sequence, count in found.items():
            counts[sequence[first], sequence[first + 1]] += count
        if counts[cells < 1e-9 * total].sum() > 0:
            return 0.0
        rare = cells < 5
        observed = np.append(counts[~rare], counts[rare].sum())
        wanted = np.append(cells[~rare], cells[rare].sum())
        observed, wanted = observed[wanted > 0], wanted[wanted > 0]
        statistic = ((observed - wanted) ** 2 / wanted).sum()
        worst = min(worst, float(chi2.sf(statistic, len(wanted) - 1)) * (TOKENS - 1))
    return worst
