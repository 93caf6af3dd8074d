"""The calibration flag of the server: what it gives the estimator, and what it refuses before weights load."""

import pytest

from sglang_dspark.confidence import HEAD, HEADLESS, RULES
from sglang_dspark.confidence.calibration import Calibration, save_calibration
from sglang_dspark.config import Refusal
from sglang_dspark.engine.calibration import FLAG, temperatures


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "c.json"
    rows = {rule: (2.0, 0.5) for rule in RULES}
    save_calibration(path, Calibration(HEADLESS.name, rows, {rule: (1, 1) for rule in RULES}, rows, rows))
    return str(path)


def test_no_file_is_no_calibration():
    assert temperatures(None, HEADLESS, 5) is None


def test_a_fitting_file_gives_its_temperatures(file):
    assert temperatures(file, HEADLESS, 2).tolist() == [[2.0, 0.5]] * 2


def test_what_does_not_fit_is_refused_and_names_the_flag(file, tmp_path):
    for path, source, gamma in ((file, HEAD, 2), (file, HEADLESS, 3), (str(tmp_path / "none.json"), HEADLESS, 2)):
        with pytest.raises(Refusal, match=FLAG):
            temperatures(path, source, gamma)
