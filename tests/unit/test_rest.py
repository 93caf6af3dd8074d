"""When the draft model rests, and what brings it back."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.schedule.rest import LONGEST, PATIENCE, SHORTEST, DraftRest


def run(rest: DraftRest, wants: int, steps: int, requests: int = 8) -> list[int]:
    return [rest.step(wants, requests) for _ in range(steps)]


def tire(rest: DraftRest) -> None:
    while not rest.resting:
        rest.step(0, 8)


def tired() -> DraftRest:
    rest = DraftRest()
    run(rest, 0, PATIENCE)
    assert not rest.resting
    tire(rest)
    return rest


def test_a_plan_that_drafts_is_left_alone():
    rest = DraftRest()
    assert run(rest, 3, 100) == [3] * 100 and not rest.resting


def test_a_few_steps_without_a_draft_do_not_cool_it_down():
    rest = DraftRest()
    for _ in range(20):
        run(rest, 0, PATIENCE)
        assert not rest.resting
        assert run(rest, 2, PATIENCE) == [2] * PATIENCE


def test_plans_that_alternate_do_not_keep_it_warm():
    rest = DraftRest()
    for _ in range(4 * PATIENCE):
        rest.step(0, 8), rest.step(0, 8), rest.step(2, 8)
    assert rest.rests > 0


def test_a_rest_ends_with_one_step_that_only_warms_up():
    rest = tired()
    assert run(rest, 2, SHORTEST - 1) == [0] * (SHORTEST - 1) and rest.resting
    assert rest.step(2, 8) == 0 and not rest.resting
    assert rest.step(2, 8) == 2


def test_another_load_ends_a_rest_at_once_where_drafting_would_pay():
    for now in (1, 5, 11, 32):
        rest = tired()
        assert rest.step(0, now) == 0 and rest.resting
        assert rest.step(1, now) == 0 and not rest.resting


def test_rests_that_end_in_vain_get_longer_and_drafting_makes_them_short_again():
    rest, lengths = tired(), []
    for _ in range(8):
        count = 0
        while rest.resting:
            rest.step(1, 8)
            count += 1
        lengths.append(count)
        tire(rest)
    assert lengths == [min(SHORTEST * 2**k, LONGEST) for k in range(8)]
    while rest.resting:
        rest.step(1, 8)
    run(rest, 1, PATIENCE)  # drafting is the rule again
    tire(rest)
    assert run(rest, 1, SHORTEST)[-1] == 0 and not rest.resting


def test_a_draft_that_never_pays_is_almost_never_run():
    rest, warm = DraftRest(), 0
    for _ in range(20_000):
        # The prior asks for a draft, what the draft then shows does not.
        rest.step(1 if rest.resting else 0, 8)
        warm += not rest.resting
    assert warm / 20_000 < 0.03


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 64)), max_size=200))
def test_it_never_drafts_deeper_than_planned_nor_straight_out_of_a_rest(steps):
    rest = DraftRest()
    was_resting = False
    for wants, requests in steps:
        depth = rest.step(wants, requests)
        assert depth in (0, wants)
        assert not (was_resting and depth)
        was_resting = rest.resting
