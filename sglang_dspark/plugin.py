"""What SGLang loads in every process: checks the SGLang version and installs the hooks. Nothing else."""


def register() -> None:
    from sglang_dspark.engine import cpu

    cpu.install()
