"""The policy of an agent for an untrusted gateway: only engines as plans start them. Pure.

A launch has no field for privileges, capabilities, other devices than GPUs, networks, namespaces or
ports, so no request can name them. All other fields are checked here against the agent's own
profiles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.domain import Engine, EngineRef, LaunchSpec, Mount
from gateway.domain.image_name import AllowedImages, is_digest_of
from gateway.domain.units import GIB
from gateway.domain.value import MAX_BYTES
from gateway.domain.wish import NAME_PATTERN
from gateway.engines.common.trace_flags import drop_trace_arguments
from gateway.engines.registry import engine_kind
from gateway.errors import AgentRefusal, BadFlag
from gateway.planner.command import check_command, check_environment

# Replicas of all models on one machine.
MAX_INSTANCES = 128
_GPU = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NAME = re.compile(r"[\w-]{1,255}")
_CACHE = re.compile(r"([0-9a-f]{16})?")
_FINGERPRINT = re.compile(r"[0-9A-Za-z]{1,64}")
_MAX_GPUS = 64
# The need of plans with 64 ranks, rounded up.
_MAX_SHARED_BYTES = 256 * GIB
_MAX_PIDS = 2**19


def check_engine(
    requested_ref: EngineRef,
    engine: Engine,
    allowed_images: AllowedImages,
    resolved_images: Mapping[str, str],
) -> None:
    """Check that the engine is that of the profile, in an allowed image. Raises AgentRefusal.

    `resolved_images` maps digests to image names that the agent itself found. A caller could
    otherwise name any image of this machine.
    """
    if (requested_ref.kind, requested_ref.version) != (engine.kind, engine.version):
        raise _policy_error(
            f"this is the profile of {engine.ref}, not of {str(requested_ref)[:80]!r}"
        )
    if not allowed_images.allows(requested_ref.image or ""):
        message, hint = allowed_images.refusal(requested_ref.image or "")
        raise AgentRefusal(f"The agent refuses: {message[0].lower()}{message[1:]}", hint=hint)
    if requested_ref.digest is None:
        return
    if not is_digest_of(requested_ref.digest, requested_ref.image or "") or (
        "@" not in requested_ref.digest
        and resolved_images.get(requested_ref.digest) != requested_ref.image
    ):
        raise AgentRefusal(
            f"The agent refuses: {requested_ref.digest[:80]!r} is not an image that it found under"
            f" the name {requested_ref.image}.",
            hint="`fitserve retry NAME` uses the present image of that name.",
        )


def check_launch(
    spec: LaunchSpec,
    engine: Engine,
    models: Mount,
    allowed_images: AllowedImages,
    resolved_images: Mapping[str, str],
    trace_endpoint: str = "",
) -> None:
    """Refuse a launch that no plan for this engine makes. Raises AgentRefusal.

    `models` is the only allowed mount. A folder below it could be replaced by a link after the
    check. `trace_endpoint` is the only collector of traces that an engine may have.
    """
    check_engine(spec.engine, engine, allowed_images, resolved_images)
    _check_names(spec)
    if any(mount != models for mount in spec.mounts):
        raise _policy_error(
            f"engines mount {models.source} at {models.target}, read-only, and nothing else"
        )
    if spec.nodes or spec.node:
        raise _policy_error(
            "an engine over several nodes may not be started, nor one of another node"
        )
    check_gpus(spec.gpus)
    if spec.gpus and engine.device == "cpu":
        raise _policy_error(f"{engine.ref} runs on no GPU")
    _check_profile_fields(spec, engine)
    _check_sizes(spec)
    try:
        argv = drop_trace_arguments(engine, spec.argv, trace_endpoint)
        check_command(
            engine, argv, spec.env, model=spec.model, port=spec.port, folder=models.target
        )
        check_environment(engine, spec.env)
    except BadFlag as error:
        raise _policy_error(error.message.rstrip(".")) from None


def _check_names(spec: LaunchSpec) -> None:
    is_valid = (
        _NAME.fullmatch(spec.name)
        and re.fullmatch(NAME_PATTERN, spec.model)
        and _FINGERPRINT.fullmatch(spec.fingerprint)
        and 0 <= spec.attempt < 2**53
    )
    if not is_valid:
        raise _policy_error(f"the name {spec.name[:80]!r} of {spec.model[:80]!r} is not valid")


def _check_profile_fields(spec: LaunchSpec, engine: Engine) -> None:
    """Refuse fields that differ from those of the engine's profile and kind. Raises
    AgentRefusal."""
    if spec.scratch != engine.scratch:
        raise _policy_error(f"the writable folders of {engine.ref} must be those of its profile")
    # The cache also depends on the image, which the agent's own host adds.
    if spec.caches != engine.caches or not _CACHE.fullmatch(spec.cache):
        raise _policy_error(f"the cache folders of {engine.ref} must be those of its profile")
    if (spec.key_env, spec.key_option) != (engine.key_env, engine.key_option):
        raise _policy_error(f"the key option of {engine.ref} must be that of its profile")
    if spec.forked_calls not in ((), engine_kind(engine.kind).forked_calls):
        raise _policy_error(f"the forked calls of {engine.ref} must be those of its kind")
    if spec.kernel_warmups not in ((), engine_kind(engine.kind).kernel_warmups):
        raise _policy_error(f"the warm-ups of {engine.ref} must be those of its kind")
    if spec.kernel_builds not in ({}, engine_kind(engine.kind).kernel_builds):
        raise _policy_error(f"the kernel builds of {engine.ref} must be those of its kind")


def _check_sizes(spec: LaunchSpec) -> None:
    bounds = {
        "shared memory": (0, spec.shm_bytes, _MAX_SHARED_BYTES),
        "port": (1024, spec.port, 65535),
        "memory": (GIB, spec.memory_bytes or 0, MAX_BYTES),
        "number of processes": (1, spec.pids, _MAX_PIDS),
    }
    for name, (minimum, value, maximum) in bounds.items():
        if not minimum <= value <= maximum:
            raise _policy_error(f"the {name} must be {minimum} to {maximum}")


def check_gpus(gpus: tuple[str, ...]) -> None:
    """Refuse values that could ask Docker for more than GPUs. Raises AgentRefusal."""
    if len(gpus) > _MAX_GPUS or not all(map(_GPU.fullmatch, gpus)) or len(set(gpus)) < len(gpus):
        raise _policy_error("GPUs must be named by UUID, each once")


def _policy_error(reason: str) -> AgentRefusal:
    return AgentRefusal(
        f"The agent refuses: {reason}.",
        hint=(
            "Gateway and agent must be of one version, with the same FITSERVE_PROFILES_DIR,"
            " FITSERVE_MODELS_DIR, FITSERVE_MODELS_SOURCE and FITSERVE_ENGINE_OTLP_ENDPOINT."
        ),
    )
