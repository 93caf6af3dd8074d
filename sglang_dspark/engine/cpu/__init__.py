"""Decides whether this process gets the pure-torch stand-ins for the sgl_kernel CPU operations, and installs them.

SGLang's CPU engine imports `sgl_kernel`, whose native CPU build is not on PyPI. Where it is missing, `install` makes
`import sgl_kernel` find the package beside this file. It must run before SGLang's first import: `torch.backends`, the
entry point group torch calls at the end of `import torch` in every process, is early enough; SGLang's own plugin hook
is not.
"""

import importlib.util
import os
import sys

from sglang_dspark.engine.cpu.finder import StandInFinder


def install() -> bool:
    """Install the stand-ins if SGLANG_USE_CPU_ENGINE=1 and no native sgl_kernel is importable. Safe to call again.

    Returns True if `import sgl_kernel` gives the stand-ins. With a real sgl_kernel, or without the CPU engine, it
    returns False and changes nothing.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return False
    if stand_ins_serve():
        return True
    if "sgl_kernel" in sys.modules or importlib.util.find_spec("sgl_kernel") is not None:
        return False
    # Last in line: a real sgl_kernel on the path is always found first.
    sys.meta_path.append(StandInFinder())

    from sglang_dspark.engine.cpu import malloc, torchvision_schemas

    torchvision_schemas.define_if_missing()
    malloc.keep_tensors_on_heap()
    return True


def stand_ins_serve() -> bool:
    """Whether `import sgl_kernel` gives the stand-ins in this process."""
    return any(isinstance(finder, StandInFinder) for finder in sys.meta_path)


def autoload() -> None:
    """What torch calls at the end of `import torch` (entry point group `torch.backends`)."""
    install()
