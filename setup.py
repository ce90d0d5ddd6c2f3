"""Package metadata of realsys. The ranges are wide; constraints.txt has the exact versions that are tested."""

import re
from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
# A package index has neither the pictures nor the pages that README.md links to.
DESCRIPTION = re.sub(r"(?<!!)\[([^][]*)\]\((?!https?:)[^)]*\)", r"\1", re.sub(r"!\[[^]]*\]\([^)]*\)\n*", "", README))

setup(
    name="realsys",
    version="0.1.0",
    description="Asynchronous reinforcement learning for language models",
    long_description=DESCRIPTION,
    long_description_content_type="text/markdown",
    author="The realsys authors",
    license_expression="Apache-2.0",
    keywords="reinforcement learning, language models, RLHF, GRPO, PPO, agents, Megatron-Core, SGLang",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11,<3.14",
    # realsys/configs, realsys/launch, realsys/slurm and realsys/workers are links to folders at the top.
    packages=find_packages(include=["realsys", "realsys.*"]),
    package_data={
        "realsys.configs": ["**/*.yaml", "*.yaml"],
        "realsys.lab.planner": ["tables/*.json"],
        "realsys.slurm": ["*.sh", "cluster/*.yaml", "*.md"],
        "realsys.observe.page": ["static/*"],
        # for the interpreters that run SGLang and vLLM
        "realsys.generation.sglang": ["cpu_support/*", "cpu_support/realsys_sglang_cpu/*.py", "inside/*.dist-info/*"],
        "realsys.generation.vllm": ["cpu_support/*"],
    },
    install_requires=[
        "aiohttp>=3.10",  # HTTP client of masters, managers and rollout workers
        "argcomplete>=3",  # completion in a shell
        "cryptography>=42",  # certificate of an etcd that a run starts
        "etcd3>=0.12",  # name store in production
        "httptools>=0.6",
        "httpx>=0.27",  # http_client of agents with base_url
        "hydra-core>=1.3",
        "jinja2>=3.1",  # chat templates
        "matplotlib>=3.8",
        "math-verify>=0.8",
        "megatron-core>=0.16.1,<0.17; python_version < '3.12'",  # 0.17 and newer have no wheel for Python 3.11
        "megatron-core>=0.16.1,<0.20; python_version >= '3.12'",
        "msgspec>=0.18",
        "numpy>=1.26",
        "packaging>=23",  # realsys doctor compares versions
        "prometheus-client>=0.20",
        "protobuf>=4",
        "psutil>=5.9",  # Megatron's checkpointing hangs without it
        "pydantic>=2.7",
        "pyzmq>=26",
        "renderers>=0.1.12,<0.2",  # tool calls and reasoning in completions, chats of several models
        "rich>=13",
        "safetensors>=0.4",
        "tokenizers>=0.21",
        "torch>=2.11,<2.15",  # its attention kernel differs between versions (realsys.cluster.gpu_devices)
        "transformers>=4.50",
        "starlette>=0.40",
        "uvicorn>=0.30",
        "uvloop>=0.19",
        "xxhash>=3.4",
    ],
    extras_require={
        "dev": [
            "fastapi>=0.110",  # what the manager's routes are measured against
            "hypothesis>=6.100",
            "import-linter>=2.0",
            "mypy>=1.10",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.6",
            "types-PyYAML",
            "types-protobuf",
            "types-psutil",
        ],
        "data": ["pyarrow>=14"],  # parquet and Arrow files, folders of the datasets package
        "reasoning-gym": ["reasoning-gym>=0.1.20"],  # data.train=reasoning_gym:NAME
        "gpu": ["nvidia-ml-py>=12"],  # utilisation and memory of GPUs in the step log
        "ray": ["ray>=2.40,<3"],  # cluster=ray
        "tinker": ["tinker==0.38.0"],  # realsys serve: messages of the protocol, which changes weekly
        # telemetry.trackers
        "wandb": ["wandb>=0.19"],
        "mlflow": ["mlflow-skinny>=3", "sqlalchemy>=2", "alembic>=1.13"],  # the latter two for a database of its own
        "trackio": ["trackio>=0.30"],
    },
    entry_points={"console_scripts": ["realsys=realsys.launch.cli:main"]},
)
