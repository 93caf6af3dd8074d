"""A draft's config.json decides how it runs; a draft that SGLang would accept and never use is refused or set right."""

from types import SimpleNamespace as Config

import pytest

from sglang_dspark.config import Refusal
from sglang_dspark.engine.draft_kind import DraftKind, check_fit, classify

LLAMA = {"vocab_size": 100, "hidden_size": 8}


@pytest.mark.parametrize(
    "kind, config",
    [
        (DraftKind.EAGLE3, {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 50}),
        (DraftKind.EAGLE3, {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}),
        (DraftKind.EAGLE, {"architectures": ["LlamaForCausalLMEagle"]}),
        (DraftKind.EAGLE, {"architectures": ["Qwen2ForCausalLMEagle"]}),
        (DraftKind.NEXTN, {"architectures": ["DeepseekV3ForCausalLMNextN"]}),
        (DraftKind.NEXTN, {"architectures": ["MiMoMTP"]}),
        (DraftKind.NEXTN, {"architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1}),
        (DraftKind.NEXTN, {"architectures": ["Qwen3NextForCausalLM"]}),
        (DraftKind.DSPARK, {"architectures": ["Qwen3DSparkModel"]}),
        (DraftKind.DSPARK, {"architectures": ["LlamaForCausalLM"], "markov_rank": 64}),
    ],
)
def test_a_draft_is_recognised_from_its_config(kind, config):
    assert classify(Config(**LLAMA, **config), "draft", is_target=False) is kind


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1},
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "text_config": Config(num_nextn_predict_layers=None, mtp_num_hidden_layers=1),
        },
        {"architectures": ["Qwen3NextForCausalLM"]},
    ],
)
def test_a_target_that_carries_a_draft_needs_no_path(config):
    assert classify(Config(**LLAMA, **config), "target", is_target=True) is DraftKind.NEXTN


def test_of_a_target_without_a_draft_only_what_its_config_says_is_said():
    target = Config(architectures=["LlamaForCausalLM"], num_nextn_predict_layers=0, mtp_num_hidden_layers=0, **LLAMA)
    with pytest.raises(Refusal, match=r"config\.json \(LlamaForCausalLM\) tells of no draft"):
        classify(target, "target", is_target=True)


def test_a_multimodal_config_counts_by_its_text_part():
    inside = Config(num_nextn_predict_layers=1, **LLAMA)
    assert classify(Config(architectures=["SomeVLModel"], text_config=inside), "t", is_target=True) is DraftKind.NEXTN
    draft = Config(architectures=["X"], text_config=Config(vocab_size=99, hidden_size=8))
    with pytest.raises(Refusal, match="vocab_size 99"):
        check_fit(DraftKind.EAGLE, draft, Config(text_config=Config(**LLAMA)), "d")


@pytest.mark.parametrize(
    "config, remedy",
    [
        ({"architectures": ["DFlashDraftModel"]}, "--speculative-algorithm DFLASH"),
        ({"architectures": ["Gemma4AssistantForCausalLM"]}, "--speculative-algorithm NEXTN"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 50}, "LlamaForCausalLMEagle3"),
        ({"architectures": ["LlamaForCausalLM"]}, "--speculative-algorithm STANDALONE"),
        ({"architectures": None}, "give such a draft"),
    ],
)
def test_what_is_no_draft_for_us_is_refused_with_a_remedy(config, remedy):
    with pytest.raises(Refusal, match=remedy):
        classify(Config(**LLAMA, **config), "draft", is_target=False)


def test_an_eagle3_draft_may_be_narrower_than_its_target_if_it_says_so():
    target = Config(vocab_size=100, hidden_size=64)
    narrow = Config(vocab_size=100, hidden_size=8, target_hidden_size=64, draft_vocab_size=50)
    check_fit(DraftKind.EAGLE3, narrow, target, "d")
    with pytest.raises(Refusal, match="hidden states of size 8"):
        check_fit(DraftKind.EAGLE3, Config(vocab_size=100, hidden_size=8), target, "d")
    with pytest.raises(Refusal, match="draft_vocab_size 101"):
        check_fit(DraftKind.EAGLE3, Config(vocab_size=100, hidden_size=64, draft_vocab_size=101), target, "d")
