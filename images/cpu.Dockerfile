# Not built by any test yet. docker build -f images/cpu.Dockerfile -t leeway:cpu .
FROM python:3.11-slim-bookworm
# vLLM and torch compile kernels when they first need them; libnuma and tcmalloc are what vLLM's CPU build loads.
RUN apt-get update && apt-get install -y --no-install-recommends g++ make git libnuma1 libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/leeway
COPY . .
RUN make install PYTHON=python3.11 && rm -rf /root/.cache
ENV PATH=/opt/leeway/.venv/bin:$PATH
ENTRYPOINT ["leeway"]
