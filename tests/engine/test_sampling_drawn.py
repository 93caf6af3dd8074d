"""What test_sampling shows, where drafts are drawn from the draft's distribution and tested against the target's."""

import pytest

from tests.engine.test_sampling import (  # noqa: F401
    LONG,
    REJECTION,
    ruled,
    server,
    target,
    test_sampled_output_has_the_targets_distribution,
    test_sampled_output_has_the_targets_distribution_at_every_depth_and_after_rests,
    test_sampled_output_has_the_targets_distribution_in_many_samples,
)

# Draws from a part of the vocabulary go through all that draws from the whole do.
VOCABULARIES = ("part", pytest.param("whole", marks=LONG))


@pytest.fixture(scope="module", params=VOCABULARIES)
def switch(request, pairs, tmp_path_factory):
    draft = pairs.chi_eagle3_part if request.param == "part" else pairs.chi_eagle3
    with ruled(pairs.chi_target, draft, tmp_path_factory.mktemp("policy"), *REJECTION) as it:
        yield it
