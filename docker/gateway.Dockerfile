# Gateway and agent. Any base image with Python 3.11 or newer and its venv module works.
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY requirements ./requirements
RUN python3 -m venv /opt/fitserve \
 && /opt/fitserve/bin/python -m pip install --no-cache-dir --require-hashes -r requirements/runtime.txt \
 && python3 -m venv /opt/build \
 && /opt/build/bin/python -m pip install --no-cache-dir --require-hashes -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY gateway ./gateway
COPY profiles ./profiles
# Pinned tools build the wheel, so every download has a hash.
RUN /opt/build/bin/python -m hatchling build -t wheel -d /src/dist \
 && /opt/fitserve/bin/python -m pip install --no-cache-dir --no-deps --no-index /src/dist/*.whl \
 && /opt/fitserve/bin/python -m pip uninstall -y pip setuptools >/dev/null

FROM ${BASE_IMAGE}
COPY --from=build /opt/fitserve /opt/fitserve
COPY docker/entrypoint.py /opt/fitserve/entrypoint.py
RUN mkdir -p /data /models /run/fitserve && chown 65532:65532 /data /models /run/fitserve && chmod 0700 /data /run/fitserve
ENV PATH=/opt/fitserve/bin:$PATH FITSERVE_DATA_DIR=/data FITSERVE_MODELS_DIR=/models HOME=/data PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["/opt/fitserve/bin/python", "/opt/fitserve/entrypoint.py"]
CMD ["fitserve", "serve"]
