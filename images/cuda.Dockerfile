# Not built by any test yet. docker build -f images/cuda.Dockerfile -t leeway:cuda .
# Run with --gpus all --shm-size=16g: weights and batches travel through /dev/shm.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends g++ make git libnuma1 python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/leeway
COPY . .
RUN make install EXTRA=cuda PYTHON=python3.12 && rm -rf /root/.cache
ENV PATH=/opt/leeway/.venv/bin:$PATH
ENTRYPOINT ["leeway"]
