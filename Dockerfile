# The image of `launch k8s`, and of `runtime: {kind: container}` of `launch gce` (docs/schedulers.md).
#   docker build -t REGISTRY/jaxres:1 .                              with CUDA 12, from the wheels of jax
#   docker build --build-arg EXTRAS=gcs -t REGISTRY/jaxres:cpu .     without
# The driver comes from the host. /dev/shm: `docker run --shm-size 16g` or --ipc=host; Docker's default of 64 MB is too
# small for NCCL and for states in host memory. `launch k8s` mounts a volume in memory there.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG EXTRAS=cuda12,gcs
ENV PYTHONUNBUFFERED=1 \
    PIP_CONSTRAINT=/opt/jaxres/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/jaxres

# The dependencies alone: this layer is built again only if they change.
COPY pyproject.toml README.md LICENSE constraints.txt ./
# PIP_CONSTRAINT has the versions.
# hadolint ignore=DL3013
RUN mkdir jaxres && touch jaxres/__init__.py \
    && python -m pip install --no-cache-dir ".[${EXTRAS}]" \
    && python -m pip uninstall --yes jaxres && rm -r jaxres build

COPY configs configs
COPY jaxres jaxres
RUN python -m pip install --no-cache-dir --no-deps . && rm -r build

# The group that `launch k8s` gives to the files of a claim.
RUN groupadd --gid 1000 jaxres && useradd --uid 1000 --gid 1000 --create-home jaxres
USER 1000:1000
WORKDIR /home/jaxres

# The exec form: the supervisor is process 1, gets SIGTERM, and collects the processes that lose their parent.
ENTRYPOINT ["python", "-m", "jaxres.train"]
CMD ["--help"]
