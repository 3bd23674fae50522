"""An engine over several nodes as a LeaderWorkerSet of Kubernetes and a Service.

A group of pods starts and ends as one. Source: sigs.k8s.io/lws 0.9.0, whose controller gives each
pod its place in the group and the address of the first.
"""

from __future__ import annotations

from typing import Any

from gateway.wishes.export.engine_start import EngineStart
from gateway.wishes.export.kubernetes import container, literal, pod_spec, service

LEADER = "$(LWS_LEADER_ADDRESS)"
PLACE = "$(LWS_WORKER_INDEX)"
_LABELS = "leaderworkerset.sigs.k8s.io"


def leader_worker_set(
    leader: EngineStart, worker: EngineStart, address: str, pods: int, copies: int
) -> list[dict[str, Any]]:
    """The LeaderWorkerSet and the Service of its first pods.

    address: variable for the address of a pod.
    pods: the number of pods of one engine.
    copies: the number of copies of the engine.
    """
    labels = {"app.kubernetes.io/name": leader.name}

    def template(start: EngineStart, *, answers_requests: bool) -> dict[str, Any]:
        return {
            "metadata": {"labels": labels},
            "spec": pod_spec(
                start, _pod_container(start, address, answers_requests=answers_requests)
            ),
        }

    group = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": leader.name, "labels": labels},
        "spec": {
            "replicas": copies,
            "leaderWorkerTemplate": {
                "size": pods,
                # A lost rank leaves the variables waiting.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": template(leader, answers_requests=True),
                "workerTemplate": template(worker, answers_requests=False),
            },
        },
    }
    first = {f"{_LABELS}/name": leader.name, f"{_LABELS}/worker-index": "0"}
    return [group, service(leader, first)]


def _pod_container(start: EngineStart, address: str, *, answers_requests: bool) -> dict[str, Any]:
    """The container of one pod. answers_requests: it has a server for requests."""
    base = container(start, is_probed=answers_requests)
    pod_address = {"name": address, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    variables = [variable for variable in base["env"] if variable["name"] != address]
    return {**base, "command": _command(start, address), "env": [pod_address, *variables]}


def _command(start: EngineStart, address: str) -> list[str]:
    """The command of a pod, with Kubernetes' variables where it names addresses and places."""
    variables = (LEADER, PLACE, f"$({address})")
    arguments = []
    products = []
    for word in start.argv:
        value = word.partition("=")[2]
        if value.startswith(f"$(({PLACE[2:-1]}*"):
            products.append(literal(word))
        elif value in variables or value.startswith(
            tuple(f"{variable}:" for variable in variables)
        ):
            arguments.append(word)
        else:
            arguments.append(literal(word))
    if not products:
        return arguments
    # Kubernetes does not compute; a shell does.
    return ["/bin/sh", "-c", f'exec "$@" {" ".join(products)}', "engine", *arguments]
