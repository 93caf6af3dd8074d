"""Tests of sglang_dspark: unit (no sglang), engine (real SGLang on the CPU), gpu; and tiny, the models they run."""
