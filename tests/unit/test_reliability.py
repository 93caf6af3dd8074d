"""AUC and calibration error by hand, with ties, chances in place of outcomes, and weights."""

import numpy as np
import pytest

from sglang_dspark.confidence.reliability import auc, calibration_error


def test_auc_counts_pairs_with_ties_half_and_chances_as_shares():
    score, hard = np.array([0.1, 0.4, 0.4, 0.9]), np.array([0.0, 0.0, 1.0, 1.0])
    assert auc(score, hard) == pytest.approx(3.5 / 4)
    assert auc(-score, hard) == pytest.approx(0.5 / 4)
    chance = np.array([0.25, 0.5, 0.5, 0.75])
    twice = np.concatenate([score, score]), np.repeat([1.0, 0.0], 4), np.concatenate([chance, 1 - chance])
    assert auc(score, chance) == pytest.approx(auc(*twice))


def test_calibration_error_is_the_weighted_gap_of_bins():
    said, truth = np.array([0.05, 0.05, 0.95, 1.0]), np.array([0.0, 1.0, 1.0, 1.0])
    assert calibration_error(said, truth) == pytest.approx((0.9 + 0.05) / 4)
    assert calibration_error(said, truth, weight=np.array([1.0, 0.0, 0.0, 1.0])) == pytest.approx(0.05 / 2)
