"""What SGLang loads in every process: checks the SGLang version and installs the hooks. Nothing else."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from sglang_dspark.config import SUPPORTED_SGLANG, Refusal, allowed_sglang


def register() -> None:
    """Entry point ``sglang.srt.plugins``. On an SGLang it was not made for, it only refuses DSPARK."""
    installed = version("sglang")
    if installed in (SUPPORTED_SGLANG, allowed_sglang()):
        from sglang_dspark.engine import cpu, hooks

        cpu.install()
        hooks.install(hooks.STARTUP)
    else:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register("sglang.srt.arg_groups.pipeline.run_resolution_pipeline", refuse_version, HookType.BEFORE)


def refuse_version(server_args: Any) -> None:
    """Before SGLang resolves its arguments.

    Raises:
        Refusal: DSPARK was asked for on an SGLang version whose internals the hooks do not know.
    """
    if str(server_args.speculative_algorithm).upper() == "DSPARK":
        raise Refusal(
            f"--speculative-algorithm DSPARK of sglang-dspark needs SGLang {SUPPORTED_SGLANG} and {version('sglang')} "
            f"is installed; install sglang=={SUPPORTED_SGLANG}, or try it with DSPARK_ALLOW_SGLANG={version('sglang')}."
        )
