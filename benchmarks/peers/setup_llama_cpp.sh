#!/usr/bin/env bash
# Make a virtual environment that holds llama-cpp-python, built here for this CPU; needs a C++ compiler and cmake.
#
#   benchmarks/peers/setup_llama_cpp.sh VENV_DIR
#   leanroll bench … --bench.peers llama_cpp --bench.peer_python llama_cpp=VENV_DIR/bin/python
set -euo pipefail

venv=${1:?"usage: $0 VENV_DIR"}

python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet "llama-cpp-python${LLAMA_CPP_PYTHON_VERSION:+==$LLAMA_CPP_PYTHON_VERSION}"
"$venv/bin/python" -c "import llama_cpp; print('llama-cpp-python', llama_cpp.__version__)"
