"""Compiles a Triton kernel for a GPU that need not be there and reads registers and spills from ptxas."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource


class Compiled(NamedTuple):
    """What ptxas reports of one kernel."""

    ptx: str
    registers: int  # a thread
    spill_bytes: int  # stores and loads together


def compile_for(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, int], *, capability: int, num_warps: int
) -> Compiled:
    """Compiles for compute capability 80, 90, 100, ...; needs no GPU, but the ptxas that Triton ships.

    signature: Triton type of each argument that is not constant. Raises FileNotFoundError where there is no ptxas and
    RuntimeError, with its output, where it fails.
    """
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature=types, constexprs=dict(constants))
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps}).asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None, "Triton always names a target"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={target[1]}", str(path), "-o", f"{path}.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    if done.returncode or registers is None:
        raise RuntimeError(f"ptxas failed for {target[1]}: {done.stderr}")
    spills = sum(int(size) for size in re.findall(r"(\d+) bytes spill", done.stderr))
    return Compiled(ptx, int(registers[1]), spills)
