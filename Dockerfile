# An image for hydra/launcher=kubernetes and skypilot (docs/clusters.md):
#   docker build -t ghcr.io/ORG/qlora-fsdp:1 .
# torch's own packages bring CUDA; the host brings the driver. `[gpu]` is what README installs.
FROM python:3.12.12-slim-bookworm

# Triton compiles its launchers with a C compiler; git is for hub data sets of older forms.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/qlora-fsdp
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
COPY conf ./conf
COPY accelerate_configs ./accelerate_configs
RUN pip install --no-cache-dir --no-compile -c constraints.txt ".[gpu]"

# A user of its own: nothing here needs root. The run folder is on a volume (run.folder).
RUN useradd --create-home --uid 1000 trainer
USER trainer
WORKDIR /home/trainer
CMD ["qlora-fsdp", "doctor"]
