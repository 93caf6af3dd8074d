"""Environment of every test: the CPU engine's, set before torch or sglang can be imported."""

import os

from benchmarks.launch import CPU_ENVIRONMENT

os.environ.update(CPU_ENVIRONMENT)
os.environ.setdefault("OMP_NUM_THREADS", "2")
