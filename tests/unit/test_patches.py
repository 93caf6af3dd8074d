"""The patches of SGLang apply, check and revert on the installed release, all or none, and refuse any other source."""

import os
import random
import subprocess
import sys
from importlib.metadata import version
from itertools import permutations

import pytest

from sglang_dspark.cli import main
from sglang_dspark.config import SUPPORTED_SGLANG
from sglang_dspark.patches import State, find_tree, open_tree
from sglang_dspark.patches.diff import parse
from tests.sglang_tree import link_tree

NAMES = [patch.name for patch in open_tree(find_tree(None)).patches]


@pytest.fixture
def tree(tmp_path):
    return link_tree(tmp_path)


def content(tree):
    """Every file that a patch may touch, and any that should not be there."""
    return {path: path.read_bytes() for path in tree.rglob("*") if path.is_file() and not path.is_symlink()}


def command(action, tree, capsys):
    code = main(["patch", action, "--tree", str(tree)])
    return code, *capsys.readouterr()


def test_patches_apply_check_and_revert_to_the_very_bytes(tree, capsys):
    stock = content(tree)
    mode = (tree / "srt/speculative/eagle_utils.py").stat().st_mode
    assert command("check", tree, capsys)[1].count(" out  ") == len(NAMES) >= 8
    assert command("apply", tree, capsys)[0] == 0
    assert command("check", tree, capsys)[1].count(" in  ") == len(NAMES)
    patched = content(tree)
    assert patched.keys() == stock.keys() and open_tree(tree).states() == dict.fromkeys(NAMES, State.IN)
    assert (tree / "srt/speculative/eagle_utils.py").stat().st_mode == mode
    for path, source in patched.items():
        compile(source, str(path), "exec")
    assert command("apply", tree, capsys)[1].startswith("0 patches")
    assert command("revert", tree.parent, capsys)[0] == 0
    assert content(tree) == stock


def test_each_patch_goes_in_and_out_without_the_others(tree):
    every = open_tree(tree)
    stock = content(tree)
    for order in random.Random(0).sample(list(permutations(every.patches, 3)), 12):
        for patch in order:
            assert type(every)(tree, [patch]).apply() == [patch.name]
        for patch in order:
            assert type(every)(tree, [patch]).revert() == [patch.name]
    assert content(tree) == stock


def spoil_context(tree):
    edit(tree, "srt/speculative/eagle_utils.py", "    is_all_greedy: bool,\n", "    is_all_greedy: bool,  # mine\n")


def leave_half_in(tree):
    open_tree(tree).apply()
    edit(tree, "kernels/ops/speculative/verify_sampling.py", "import is_cpu, is_cuda", "import is_cuda")


def other_version(tree):
    edit(tree, "_version.py", "__version__ = version = '0.5.23'", "__version__ = version = '0.5.24'")


def no_version(tree):
    (tree / "_version.py").unlink()


def missing_file(tree):
    (tree / "srt/speculative/spec_registry.py").unlink()


def edit(tree, name, old, new):
    path = tree / name
    text = path.read_text()
    assert old in text
    path.unlink()  # it may be a link to the installed file
    path.write_text(text.replace(old, new))


SPOILT = (spoil_context, leave_half_in, other_version, no_version, missing_file)


@pytest.mark.parametrize("action", ("apply", "revert"))
@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_mismatch_is_refused_with_one_sentence_and_nothing_touched(tree, capsys, spoil, action):
    if action == "revert":
        open_tree(tree).apply()
    spoil(tree)
    before = content(tree)
    code, out, err = command(action, tree, capsys)
    assert (code, out, err.count("\n")) == (1, "", 1) and "Traceback" not in err
    assert content(tree) == before


def test_a_half_applied_patch_is_said_to_be_half_in(tree, capsys):
    leave_half_in(tree)
    assert "02-cpu-verify-sampling is only half in" in command("apply", tree, capsys)[2]
    code, out, _ = command("check", tree, capsys)
    assert code == 1 and " changed  02-cpu-verify-sampling" in out


def test_a_write_that_fails_half_way_is_taken_back(tree, capsys, monkeypatch):
    before, replaced = content(tree), []
    replace = os.replace

    def fails_at_the_third(source, target):
        if len(replaced) == 2:
            replaced.append(target)
            raise PermissionError(13, "Permission denied", str(target))
        replaced.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails_at_the_third)
    code, _, err = command("apply", tree, capsys)
    assert code == 1 and "cannot be written" in err and len(replaced) == 5
    assert content(tree) == before


@pytest.mark.parametrize(
    "text",
    (
        "only a reason\n",
        "--- a/python/sglang/x.py\n+++ b/python/sglang/y.py\n@@ -1 +1 @@\n-a\n+b\n",
        "--- a/python/sglang/../x.py\n+++ b/python/sglang/../x.py\n@@ -1 +1 @@\n-a\n+b\n",
        "--- a/python/sglang/x.py\n+++ b/python/sglang/x.py\n@@ -1,2 +1 @@\n-a\n+b\n",
        "--- a/python/sglang/x.py\n+++ b/python/sglang/x.py\n",
        "--- /dev/null\n+++ b/python/sglang/x.py\n@@ -0,0 +1 @@\n+b\n",
        "--- a/python/sglang/x.py",
    ),
)
def test_a_damaged_patch_is_refused(text):
    with pytest.raises(ValueError, match="Patch x "):
        parse("x", text)


def test_lines_that_stand_twice_are_no_place_for_a_patch():
    (file,) = parse("x", "--- a/python/sglang/x.py\n+++ b/python/sglang/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n").files
    assert file.state("a\nb\n") is State.OUT and file.state("x\na\nc\n") is State.IN
    assert file.state("a\nb\na\nb\n") is file.state("aa\nb\n") is file.state("") is State.CHANGED


def test_the_patches_are_for_the_supported_version_and_say_why():
    assert version("sglang") == SUPPORTED_SGLANG
    for patch in open_tree(find_tree(None)).patches:
        assert len(patch.reason) > 100 and patch.reason.endswith(".")
        assert "sglang_dspark" not in "".join(hunk.new for file in patch.files for hunk in file.hunks)


def test_the_patches_are_in_the_wheel(tmp_path):
    """As setuptools would put them there; a build itself takes a minute."""
    script = "import setuptools, sys; sys.argv = ['setup.py', '-q', 'build_py', '-d', sys.argv[1]]; import setup"
    root = find_root()
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, check=True, capture_output=True)
    built = {path.stem for path in (tmp_path / "sglang_dspark/patches" / f"sglang-{SUPPORTED_SGLANG}").glob("*.patch")}
    assert built == set(NAMES)


def find_root():
    import sglang_dspark

    return os.path.dirname(os.path.dirname(os.path.abspath(sglang_dspark.__file__)))
