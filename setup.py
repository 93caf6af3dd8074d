"""Package metadata. sglang and torch are used, never installed: a serving environment already has the right builds."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="sglang-dspark",
    version="0.1.0",
    description="Confidence-scheduled speculative decoding for stock SGLang: --speculative-algorithm DSPARK",
    long_description=(HERE / "README.md").read_text(encoding="utf-8") if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["sglang_dspark", "sglang_dspark.*"]),
    package_data={"sglang_dspark.patches": ["sglang-*/*.patch"]},
    # Everything else the package imports (torch, triton, numpy, safetensors, transformers, tqdm) comes with SGLang.
    install_requires=[],
    extras_require={"report": ["matplotlib", "rich"]},
    entry_points={
        "sglang.srt.plugins": ["dspark = sglang_dspark.plugin:register"],
        # SGLang's CPU engine binds sgl_kernel before it loads plugins; torch calls this one as it is imported.
        "torch.backends": ["sglang_dspark_cpu = sglang_dspark.engine.cpu:autoload"],
        "console_scripts": ["sglang-dspark = sglang_dspark.cli:main"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
