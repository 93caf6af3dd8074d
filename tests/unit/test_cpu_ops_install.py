"""The stand-ins appear only where the CPU engine needs them, early enough, and never instead of a real sgl_kernel."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(code: str, path: Path | None = None, **environment: str) -> str:
    """Run code in a fresh interpreter and return what it printed; the CPU engine is on unless told otherwise."""
    search = [str(p) for p in (path, ROOT) if p]
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(search), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


INSTALL = "from sglang_dspark.engine import cpu; print(cpu.install(), cpu.install())\n"


def test_sgl_kernel_is_importable_with_its_operations():
    code = (
        INSTALL + "import torch, sgl_kernel.speculative, sgl_kernel.mamba\n"
        "from sgl_kernel import verify_tree_greedy_cpu\n"
        "names = 'decode_attention_cpu', 'extend_attention_cpu', 'convert_weight_packed'\n"
        "print(*(hasattr(torch.ops.sgl_kernel, name) for name in names))"
    )
    assert run(code) == "True True\nTrue True False"


def test_an_operation_without_a_stand_in_raises_only_when_called():
    code = (
        INSTALL + "from sgl_kernel import fused_experts_cpu\n"
        "try: fused_experts_cpu(1)\n"
        "except RuntimeError as e: print('fused_experts_cpu' in str(e))\n"
        "try: from sgl_kernel import silu_and_mul\n"
        "except ImportError: print('no CUDA names')"
    )
    assert run(code) == "True True\nTrue\nno CUDA names"


def test_nothing_changes_without_the_cpu_engine():
    code = INSTALL + "import importlib.util; print(importlib.util.find_spec('sgl_kernel'))"
    assert run(code, SGLANG_USE_CPU_ENGINE="0") == "False False\nNone"


def test_a_real_sgl_kernel_is_never_shadowed(tmp_path: Path):
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("real = True\n")
    assert run(INSTALL + "import sgl_kernel; print(sgl_kernel.real)", tmp_path) == "False False\nTrue"
    appears_later = (
        INSTALL + f"import sys; sys.path.append({str(tmp_path)!r}); import sgl_kernel; print(sgl_kernel.real)"
    )
    assert run(appears_later) == "True True\nTrue"


def test_import_torch_alone_installs_them(tmp_path: Path):
    """torch calls the `torch.backends` entry points of every installed distribution; setup.py must declare ours."""
    declared = "sglang_dspark_cpu = sglang_dspark.engine.cpu:autoload"
    assert declared in (ROOT / "setup.py").read_text()
    info = tmp_path / "probe-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{declared}\n")
    code = "import torch, sgl_kernel; print('sglang_dspark' in sgl_kernel.__file__)"
    assert run(code, tmp_path) == "True"


def test_torchvision_imports_beside_a_cpu_torch():
    assert run(INSTALL + "import torchvision.transforms; print('ok')") == "True True\nok"
