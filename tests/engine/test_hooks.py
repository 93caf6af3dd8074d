"""Every hook's target exists in the installed SGLang, with the parameters that the hook was written for."""

import inspect
import pkgutil

import pytest

from sglang_dspark.engine.hooks import NATIVE, NATIVE_GAPS, STARTUP, WORKER, needed, whole_path
from sglang_dspark.patches import State, find_tree, open_tree
from tests.engine.conftest import refusal

HOOKS = [*STARTUP, *WORKER, *NATIVE_GAPS, *NATIVE]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_a_hooks_target_is_what_it_was_written_for(hook):
    place, name = whole_path(hook.target).rsplit(".", 1)
    target = getattr(pkgutil.resolve_name(place), name)
    if target is None or not hook.parameters:
        return  # a name that SGLang leaves empty on some platforms
    target = inspect.unwrap(target)
    assert ", ".join(inspect.signature(target).parameters) == hook.parameters


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_a_hook_is_three_lines_and_says_why(hook):
    lines = [line for line in inspect.getsource(hook.function).splitlines()[1:] if line.strip()]
    assert len(lines) <= 3
    assert hook.reason and hook.breaks


def test_a_hook_is_left_out_where_its_patches_are_in_and_only_there():
    patches = [patch.name for patch in open_tree(find_tree(None)).patches]
    assert {name for hook in HOOKS for name in hook.patches} <= set(patches)
    assert needed(WORKER, {}) == needed(WORKER, dict.fromkeys(patches, State.OUT)) == list(WORKER)
    assert needed(WORKER, dict.fromkeys(patches, State.IN)) == [hook for hook in WORKER if not hook.patches]
    without = needed(WORKER, {"03-cpu-draft-sampling": State.IN})
    assert [hook.target for hook in WORKER if hook not in without] == ["speculative.spec_utils.fast_sample"]


@pytest.mark.parametrize("state", (State.IN, State.CHANGED))
def test_a_source_that_is_neither_the_release_nor_patched_is_refused(state):
    refusal(lambda: needed(WORKER, {"02-cpu-verify-sampling": state}))
