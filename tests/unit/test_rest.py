"""When the draft model rests, and what brings it back."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.schedule.rest import LONGEST, PATIENCE, SHORTEST, DraftRest


def run(rest: DraftRest, pays: bool, steps: int, requests: int = 8) -> list[bool]:
    return [rest.step(pays, requests) for _ in range(steps)]


def tire(rest: DraftRest) -> None:
    while not rest.resting:
        rest.step(False, 8)


def tired() -> DraftRest:
    rest = DraftRest()
    run(rest, False, PATIENCE)
    assert not rest.resting
    tire(rest)
    return rest


def test_a_plan_that_drafts_is_left_alone():
    rest = DraftRest()
    assert run(rest, True, 100) == [True] * 100 and not rest.resting


def test_a_few_steps_without_a_draft_do_not_cool_it_down():
    rest = DraftRest()
    for _ in range(20):
        run(rest, False, PATIENCE)
        assert not rest.resting
        assert run(rest, True, PATIENCE) == [True] * PATIENCE


def test_plans_that_alternate_do_not_keep_it_warm():
    rest = DraftRest()
    for _ in range(4 * PATIENCE):
        run(rest, False, 2), run(rest, True, 1)
    assert rest.rests > 0


def test_a_rest_ends_with_one_step_that_only_warms_up():
    rest = tired()
    assert run(rest, True, SHORTEST - 1) == [False] * (SHORTEST - 1) and rest.resting
    assert not rest.step(True, 8) and not rest.resting
    assert rest.step(True, 8)


def test_another_load_ends_a_rest_at_once_where_drafting_would_pay():
    for now in (1, 5, 11, 32):
        rest = tired()
        assert not rest.step(False, now) and rest.resting
        assert not rest.step(True, now) and not rest.resting


def test_rests_that_end_in_vain_get_longer_and_drafting_makes_them_short_again():
    rest, lengths = tired(), []
    for _ in range(8):
        count = 0
        while rest.resting:
            rest.step(True, 8)
            count += 1
        lengths.append(count)
        tire(rest)
    assert lengths == [min(SHORTEST * 2**k, LONGEST) for k in range(8)]
    while rest.resting:
        rest.step(True, 8)
    run(rest, True, PATIENCE)  # drafting is the rule again
    tire(rest)
    assert not run(rest, True, SHORTEST)[-1] and not rest.resting


def test_a_draft_that_never_pays_is_almost_never_run():
    rest, warm = DraftRest(), 0
    for _ in range(20_000):
        # The prior asks for a draft, what the draft then shows does not.
        rest.step(rest.resting, 8)
        warm += not rest.resting
    assert warm / 20_000 < 0.03


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=200))
def test_it_never_lets_a_draft_run_in_a_rest_nor_straight_out_of_one(steps):
    rest = DraftRest()
    was_resting = False
    for pays, requests in steps:
        drafts = rest.step(pays, requests)
        assert not (drafts and (was_resting or rest.resting))
        was_resting = rest.resting
