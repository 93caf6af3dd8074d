"""What is taken for the time of a step, on a host that sees it end and beside a device."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.engine.clock import MOST_HOST_SHARE, StepClock


def test_the_clock_counts_a_step_that_was_launched_before_the_last_one_arrived():
    clock = StepClock()
    clock.starts(0.0)
    clock.starts(1.0)
    assert clock.arrives(3.0) is None  # nothing arrived before it
    clock.starts(3.5)
    assert clock.arrives(5.0) == 2.0
    assert clock.arrives(8.0) == 3.0
    clock.starts(9.0)  # the device had nothing to do from 8 to 9
    assert clock.arrives(10.0) == 1.0


def test_without_overlap_a_device_is_timed_from_outcome_to_outcome_too():
    clock = StepClock()
    clock.starts(0.0)
    assert clock.arrives(1.0) is None
    clock.starts(1.25)
    assert clock.arrives(2.25) == 1.25  # the host's work counts, as on a CPU


def test_the_clock_leaves_out_a_step_behind_a_prefill():
    clock = StepClock()
    clock.starts(0.0)
    clock.starts(0.1)
    clock.arrives(1.0)
    clock.interrupted()
    clock.starts(1.1)
    clock.starts(1.2)
    assert clock.arrives(2.0) == 1.0  # was under way before the prefill
    assert clock.arrives(9.0) is None  # the prefill is in this one
    assert clock.arrives(10.0) == 1.0


def test_an_outcome_taken_after_a_prefills_launch_is_as_late_as_the_host_was_busy():
    clock = StepClock()
    clock.starts(0.0)
    clock.starts(0.1)
    clock.arrives(1.0)
    clock.interrupted()  # launched before the outcome of the second step is taken, as overlap does it
    assert clock.arrives(7.0) is None
    clock.starts(7.1)
    assert clock.arrives(8.0) is None  # the prefill is in this one
    clock.starts(8.1)
    assert clock.arrives(9.0) == 1.0


def test_on_a_cpu_the_hosts_work_before_a_step_counts_and_a_wait_does_not():
    clock = StepClock()
    clock.starts(0.0)
    assert clock.ends(1.0) == 1.0
    clock.starts(1.25)
    assert clock.ends(2.25) == 1.25
    clock.starts(9.0)
    assert clock.ends(10.0) == 1.0


# In 64ths of a second, which add up without rounding.
SECONDS = st.integers(1, 640).map(lambda n: n / 64)


@given(st.lists(st.tuples(SECONDS, st.booleans(), SECONDS), max_size=12))
def test_on_a_cpu_no_prefill_however_short_is_in_a_steps_time(steps):
    clock, now = StepClock(), 1.0
    clock.starts(0.0)
    clock.ends(now)
    for gap, prefill, step in steps:  # what lies before a step, whether a prefill is in it, and the step
        if prefill:
            clock.interrupted()
        clock.starts(now := now + gap)
        took = clock.ends(now := now + step)
        assert took == (step if prefill or gap >= MOST_HOST_SHARE * step else gap + step)


def test_a_prefill_launched_while_a_step_runs_is_in_the_next_ones_gap():
    clock = StepClock()
    clock.starts(0.0)
    clock.interrupted()
    clock.ends(1.0)
    clock.starts(1.25)
    assert clock.ends(2.25) == 1.0
    clock.starts(2.5)
    assert clock.ends(3.5) == 1.25
