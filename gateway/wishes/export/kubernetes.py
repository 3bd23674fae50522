"""A start as a Deployment and a Service of Kubernetes, for `kubectl apply -f FILE`.

GPUs are a number there. The node has to equal this machine, with the model in the same folder.
"""

from __future__ import annotations

from typing import Any

from gateway.wishes.export.engine_start import EngineStart

# A start may take half an hour: weights of hundreds of GiB are read, and kernels compiled.
_START_TRIES = 180
_PROBE_INTERVAL_S = 10
# Kubernetes itself waits one second. SGLang generates a token for /health, which takes at least
# one, and gives up after 20 (0.5.10.post1 to 0.5.23, srt/entrypoints/http_server.py).
_ANSWER_S = 25


# A volume, the path of its mount, and whether the mount is read-only.
_Volume = tuple[dict[str, Any], str, bool]


def kubernetes(start: EngineStart, copies: int = 1) -> list[dict[str, Any]]:
    """The Deployment and the Service of an engine."""
    labels = {"app.kubernetes.io/name": start.name}
    meta = {"name": start.name, "labels": labels}
    pod = pod_spec(start, container(start))
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        # Two engines never share the GPUs.
        "spec": {
            "replicas": copies,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return [deployment, service(start, labels)]


def pod_spec(start: EngineStart, engine_container: dict[str, Any]) -> dict[str, Any]:
    """The pod around the container of an engine."""
    return {
        # A process 1 other than the engine: SGLang as process 1 reports a dead scheduler as
        # success.
        "shareProcessNamespace": True,
        "containers": [engine_container],
        "volumes": [
            {"name": name, **source} for name, (source, _, _) in _named_volumes(start).items()
        ],
    }


def service(start: EngineStart, selector: dict[str, str]) -> dict[str, Any]:
    """The Service of the pods that answer requests."""
    ports = [{"name": "http", "port": start.port, "targetPort": "http"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": start.name, "labels": {"app.kubernetes.io/name": start.name}},
        "spec": {"selector": selector, "ports": ports},
    }


def _named_volumes(start: EngineStart) -> dict[str, _Volume]:
    volumes: dict[str, _Volume] = {
        f"model-{number}": (
            ({"hostPath": {"path": mount.source}}, mount.target, mount.is_read_only)
            if mount.kind == "bind"
            else (
                {"persistentVolumeClaim": {"claimName": mount.source}},
                mount.target,
                mount.is_read_only,
            )
        )
        for number, mount in enumerate(start.mounts)
    }
    volumes["shm"] = (
        {"emptyDir": {"medium": "Memory", "sizeLimit": str(start.shm_bytes)}},
        "/dev/shm",  # noqa: S108 - a mount
        False,
    )
    volumes |= {
        f"scratch-{number}": ({"emptyDir": {}}, folder, False)
        for number, folder in enumerate(start.scratch or ())
    }
    return volumes


def container(start: EngineStart, *, is_probed: bool = True) -> dict[str, Any]:
    """The container of an engine. is_probed: it answers requests."""
    limits = {
        **({"nvidia.com/gpu": len(start.gpus)} if start.gpus else {}),
        **({"memory": str(start.memory_bytes)} if start.memory_bytes is not None else {}),
    }
    probe = {
        "httpGet": {"path": "/health", "port": start.port},
        "periodSeconds": _PROBE_INTERVAL_S,
        "timeoutSeconds": _ANSWER_S,
    }
    return {
        "name": "engine",
        "image": start.image,
        "command": [literal(word) for word in start.argv],
        "env": [{"name": name, "value": literal(value)} for name, value in start.variables.items()],
        **({"ports": [{"containerPort": start.port, "name": "http"}]} if is_probed else {}),
        "resources": {"limits": limits} if limits else {},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": start.scratch is not None,
            "capabilities": {
                "drop": ["ALL"],
                **({"add": list(start.capabilities)} if start.capabilities else {}),
            },
        },
        **(
            {"startupProbe": {**probe, "failureThreshold": _START_TRIES}, "readinessProbe": probe}
            if is_probed
            else {}
        ),
        "volumeMounts": [
            {"name": name, "mountPath": path, "readOnly": is_read_only}
            for name, (_, path, is_read_only) in _named_volumes(start).items()
        ],
    }


def literal(text: str) -> str:
    """Kubernetes puts variables in the place of $(NAME)."""
    return text.replace("$(", "$$(")
