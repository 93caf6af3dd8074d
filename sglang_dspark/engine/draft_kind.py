"""Which kind of draft a checkpoint is, and whether it fits its target, from the two config.json alone.

SGLang believes its flag: an EAGLE3 draft started as EAGLE loads, runs and accepts nothing. Here the checkpoint decides.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from sglang_dspark.config import Refusal

FLAG = "--speculative-draft-model-path"
# Published with a prediction layer that config.json does not tell of; SGLang runs it all the same (its ModelConfig).
UNSAID_NEXTN = ("Qwen3NextForCausalLM",)


class DraftKind(Enum):
    EAGLE3 = "EAGLE3"
    EAGLE = "EAGLE"
    NEXTN = "NEXTN"
    """A multi-token-prediction layer in, or beside, the target's own checkpoint. SGLang runs it as EAGLE."""
    DSPARK = "DSPARK"
    """A native DSpark draft: SGLang's own drafter and verify, see engine.native."""


def text_config(config: Any) -> Any:
    """The language part of a multimodal config, or the config itself."""
    return getattr(config, "text_config", None) or config


def classify(draft: Any, path: str, *, is_target: bool) -> DraftKind:
    """Kind of the draft with Hugging Face config ``draft`` at ``path``; ``is_target``: the target's own checkpoint.

    Raises:
        Refusal: the checkpoint is no draft that this algorithm can run.
    """
    architecture = (getattr(draft, "architectures", None) or ["none"])[0]
    name = architecture.lower()
    if "dspark" in name or _says_dspark(draft):
        return DraftKind.DSPARK
    if "dflash" in name:
        raise Refusal(f"{FLAG} {path} is a DFlash draft; start it with --speculative-algorithm DFLASH.")
    if "gemma4" in name and "assistant" in name:
        raise Refusal(f"{FLAG} {path} is a Gemma4 assistant; start it with --speculative-algorithm NEXTN.")
    if "eagle3" in name:
        return DraftKind.EAGLE3
    if getattr(draft, "draft_vocab_size", None) and not is_target:
        raise Refusal(
            f"{FLAG} {path} looks like an EAGLE3 draft (draft_vocab_size) but names the architecture {architecture}; "
            'set "architectures": ["LlamaForCausalLMEagle3"] in its config.json.'
        )
    if "eagle" in name:
        return DraftKind.EAGLE
    text = text_config(draft)
    layers = getattr(text, "num_nextn_predict_layers", None) or getattr(text, "mtp_num_hidden_layers", None)
    if layers or architecture in UNSAID_NEXTN or name.endswith(("nextn", "mtp")) or (not is_target and "mtp" in name):
        return DraftKind.NEXTN
    if is_target:
        raise Refusal(
            f"{FLAG} is missing, or names the target, and the target's config.json ({architecture}) tells of no draft; "
            "give the folder or name of an EAGLE, EAGLE3, NEXTN or DSpark draft for this target."
        )
    raise Refusal(
        f"{FLAG} {path} is a {architecture}, not an EAGLE, EAGLE3, NEXTN or DSpark draft; give such a draft, or use "
        "--speculative-algorithm STANDALONE for a small model of the same family."
    )


def _says_dspark(config: Any) -> bool:
    markov = getattr(text_config(config), "markov_rank", None) or getattr(config, "dspark_markov_rank", None)
    return bool(markov) or getattr(config, "dspark_config", None) is not None


def check_fit(kind: DraftKind, draft: Any, target: Any, path: str) -> None:
    """Refuse a draft whose vocabulary or hidden size is not its target's.

    Raises:
        Refusal: the sizes differ.
    """
    if kind in (DraftKind.NEXTN, DraftKind.DSPARK):
        return  # shares the target's embedding by construction / is checked by SGLang
    draft, target = text_config(draft), text_config(target)
    if draft.vocab_size != target.vocab_size:
        raise Refusal(
            f"{FLAG} {path} has vocab_size {draft.vocab_size} but the target has {target.vocab_size}; "
            "use a draft trained for this target."
        )
    hidden = getattr(draft, "target_hidden_size", None) or draft.hidden_size
    if hidden != target.hidden_size:
        raise Refusal(
            f"{FLAG} {path} expects target hidden states of size {hidden} but the target has {target.hidden_size}; "
            "use a draft trained for this target."
        )
    reduced = getattr(draft, "draft_vocab_size", None)
    if reduced and reduced > target.vocab_size:
        raise Refusal(
            f"{FLAG} {path} has draft_vocab_size {reduced}, more than the target's vocabulary of {target.vocab_size}; "
            "use a draft trained for this target."
        )
