"""Every hook's target exists in the installed SGLang, with the parameters that the hook was written for."""

import inspect
import pkgutil

import pytest

from sglang_dspark.engine.hooks import STARTUP, WORKER, needed
from sglang_dspark.patches import find_tree, open_tree
from tests.engine.conftest import refusal

HOOKS = [*STARTUP, *WORKER]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_a_hooks_target_is_what_it_was_written_for(hook):
    place, name = f"sglang.srt.{hook.target}".rsplit(".", 1)
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
    patches = frozenset(patch.name for patch in open_tree(find_tree(None)).patches)
    named = {name for hook in HOOKS for name in hook.patches}
    assert named <= patches
    assert needed(WORKER, frozenset()) == list(WORKER)
    assert needed(WORKER, patches) == [hook for hook in WORKER if not hook.patches]
    without = needed(WORKER, frozenset({"03-cpu-draft-sampling"}))
    assert [hook.target for hook in WORKER if hook not in without] == ["speculative.spec_utils.fast_sample"]


def test_some_of_the_patches_that_stand_for_a_hook_are_refused():
    refusal(lambda: needed(WORKER, frozenset({"02-cpu-verify-sampling"})))
