#!/usr/bin/env bash
# llama.cpp for tests, in an environment of its own: install_llama_cpp.sh FOLDER [PYTHON]. Half a minute, and 0.5 GB.
# xllamacpp is llama.cpp built for CPUs. llama.cpp's converters are in no package of its makers; the sources of
# llama-cpp-python have them, which are not built here. Where one of these can't be had, it says so and leaves nothing.
set -euo pipefail
folder=$1
python=${2:-python3}
sources=llama_cpp_python-0.3.36
if [[ -e $folder && ! -L $folder && ! -e $folder/pyvenv.cfg ]]; then
  echo "$folder is no environment of Python. Name another folder."
  exit 2
fi
rm -rf "$folder"
"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip --quiet --disable-pip-version-check)

install_all() {
  "${pip[@]}" install --no-compile --no-deps xllamacpp==2026.10.11549 sentencepiece==0.2.3 \
    && "${pip[@]}" download --no-deps --no-binary :all: --dest "$folder" llama-cpp-python==0.3.36 \
    && tar -xzf "$folder/$sources.tar.gz" -C "$folder" "$sources/vendor/llama.cpp"
}
if ! install_all; then
  echo "xllamacpp, or the sources of llama-cpp-python, can't be had from the package index: its tests are skipped"
  rm -rf "$folder"
  exit 0
fi
mv "$folder/$sources/vendor/llama.cpp" "$folder/llama.cpp"
rm -rf "${folder:?}/$sources" "$folder/$sources.tar.gz"
touch "$folder/.installed"
