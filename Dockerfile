# One image for all nodes of a cluster (docs/cluster.md).
#   docker build -t trimtab .
#   docker build -t trimtab:cpu --build-arg TORCH=cpu .
# torch's wheels bring CUDA's libraries; the driver is the host's (nvidia-container-toolkit).
FROM python:3.12-slim
ARG TORCH=cu130
# Triton compiles the launchers of its kernels when they are first used.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev procps wget && rm -rf /var/lib/apt/lists/*
# torch first: it is the largest layer, and changes least.
RUN pip install --no-cache-dir "torch>=2.11,<2.16" --index-url "https://download.pytorch.org/whl/${TORCH}"
WORKDIR /opt/trimtab
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir ".[ray,data,tasks,serve]"
WORKDIR /work
CMD ["trimtab", "--help"]
