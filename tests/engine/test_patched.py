"""On an SGLang with our patches in and without the hooks that they stand for, output is as right as with the hooks."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.launch import Server
from sglang_dspark.engine.hooks import WORKER
from sglang_dspark.patches import open_tree
from tests.engine.asks import ASKS, ENDLESS, NeverThese, ask, same
from tests.engine.conftest import base, switched
from tests.engine.test_exact import check
from tests.engine.test_features import FLAGS, check_mixed, check_stop_strings, wanted  # noqa: F401
from tests.engine.test_sampling import ALPHA, REJECTION, SAMPLES, distribution, p_value, sample, target  # noqa: F401
from tests.sglang_tree import link_tree

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
FEW = 2000  # that nothing is sampled, or that a filter is left out, shows in a tenth of these
FILTERS = {"top_k": 6, "top_p": 0.7, "min_p": 0.1, "temperature": 1.3}


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> dict[str, str]:
    """The environment of a server that runs a patched SGLang."""
    folder = tmp_path_factory.mktemp("patched")
    assert len(open_tree(link_tree(folder)).apply()) >= 8
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}


def test_greedy_output_is_plain_decoding_on_a_patched_sglang(pairs, patched, expected, prompts, tmp_path):
    with switched(tmp_path, pairs.target, pairs.eagle3, "--speculative-num-steps", "3", env=patched) as running:
        check(running, expected, prompts)
        assert all_left_out(running.server)


def test_each_ask_is_answered_as_without_speculation(pairs, patched, plain, prompts, wanted, tmp_path):  # noqa: F811
    flags = (*FLAGS, "--enable-custom-logit-processor")
    with switched(tmp_path, pairs.target, pairs.eagle3, *flags, env=patched) as running:
        for policy in ("none", "all", "random", "own"):
            check_mixed(running.to(policy), wanted, prompts)
        check_stop_strings(running.to("all"), plain, prompts)
        info = running.server.info()["dspark"]
        assert info["faults"] == {} and info["accepted"] > 0
        assert all_left_out(running.server)


@pytest.mark.parametrize("rule", ((), REJECTION), ids=("argmax", "sampled"))
def test_sampled_output_has_the_targets_distribution_on_a_patched_sglang(pairs, patched, target, tmp_path, rule):  # noqa: F811
    flags = ("--speculative-num-steps", "3", "--disable-radix-cache", *rule)
    with switched(tmp_path, pairs.chi_target, pairs.chi_eagle3, *flags, env=patched) as running:
        server = running.server
        assert p_value(sample(server, SAMPLES), distribution(target)) > ALPHA
        assert p_value(sample(server, SAMPLES, **FILTERS), distribution(target, **FILTERS)) > ALPHA
        running.to("random")
        assert p_value(sample(server, SAMPLES), distribution(target)) > ALPHA
        info = server.info()["dspark"]
        assert info["faults"] == {} and 0.05 < info["accepted"] / info["verified"] < 0.95
        assert all_left_out(server)


@pytest.mark.parametrize("topk", (1, 2), ids=("chain", "tree"))
def test_stock_eagle3_samples_on_a_patched_cpu_engine(pairs, patched, target, topk):  # noqa: F811
    draft = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(pairs.chi_eagle3)]
    shape = ["--speculative-num-steps", "2", "--speculative-eagle-topk", str(topk), "--disable-radix-cache"]
    tokens = ["--speculative-num-draft-tokens", "3" if topk == 1 else "5"]
    with Server(*base(pairs.chi_target), *draft, *shape, *tokens, env=patched) as server:
        assert p_value(sample(server, FEW), distribution(target)) > ALPHA
        assert p_value(sample(server, FEW, **FILTERS), distribution(target, **FILTERS)) > ALPHA


def test_stock_eagle3_answers_as_without_speculation_on_a_patched_sglang(pairs, patched, plain, prompts, wanted):  # noqa: F811
    draft = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(pairs.eagle3)]
    shape = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
    never = {"sampling_params": {**ENDLESS, "custom_params": {}}, "custom_logit_processor": NeverThese.to_str()}
    flags = (*draft, *shape, "--enable-custom-logit-processor")
    with Server(*base(pairs.target), *flags, env=patched) as server, ThreadPoolExecutor(len(ASKS)) as pool:
        answers = {name: pool.submit(ask, server, prompts[i], body) for i, (name, body) in enumerate(ASKS.items())}
        wrong = [name for name, answer in answers.items() if not same(answer.result(), wanted[name])]
        # That one looks at what its request has said, which a verify of several tokens cannot tell it.
        assert set(wrong) <= {"custom logit processor"}
        for prompt in prompts:
            assert same(ask(server, prompt, never), ask(plain, prompt, never))
        check_stop_strings(server, plain, prompts)


@pytest.mark.parametrize("tree", ("patched", "stock"))
def test_each_gap_is_there_and_is_mended(patched, tree):
    environment = {**os.environ, **(patched if tree == "patched" else {})}
    command = [sys.executable, "-m", "tests.engine.patched_behaviour"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 9 and set(found.values()) == {tree == "patched"}, found


def all_left_out(server) -> bool:
    """Whether none of the hooks that a patch stands for was installed."""
    mending = sum(bool(hook.patches) for hook in WORKER)
    return f"SGLang is patched; {mending} of {len(WORKER)} hooks are left out" in server.log.read_text()
