"""Environment of every test: the CPU engine's, set before torch or sglang can be imported."""

import os

from benchmarks.launch import CPU_ENVIRONMENT

os.environ.update(CPU_ENVIRONMENT)
# Tiny models gain nothing from a second thread, and two that spin on a busy core lose 20-fold.
os.environ["OMP_NUM_THREADS"] = "1"
