# Images to train in. On a CPU:         docker build --target cpu -t unstale:cpu .
# On NVIDIA GPUs (never built yet):     docker build --target cuda -t unstale:cuda .
# A run:    docker run --rm -v "$PWD/runs:/work/runs" unstale:cpu train retail --minutes 1 --name first
# The steps of `cpu` without a container runtime:    python -m tools.image_steps cpu FOLDER

FROM python:3.12-slim AS base
# The C compiler makes the kernels when they are first used.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 OMP_WAIT_POLICY=PASSIVE
WORKDIR /unstale
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY unstale unstale

FROM base AS cpu
# TORCH_OPTIONS may name the index that has CPU builds of torch. Other builds also work, and are larger.
ARG TORCH_OPTIONS=""
RUN pip install -c constraints.txt $TORCH_OPTIONS torch
RUN pip install -c constraints.txt '.[datasets,dashboard,endpoint,math]'
WORKDIR /work
ENTRYPOINT ["unstale"]

FROM base AS cuda
# torch's usual build for Linux brings the CUDA libraries that it needs; the host has the driver.
RUN pip install -c constraints.txt torch triton==3.7.1
RUN pip install -c constraints.txt '.[datasets,dashboard,endpoint,math,cluster]'
WORKDIR /work
ENTRYPOINT ["unstale"]
