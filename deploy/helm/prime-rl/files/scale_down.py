"""Waits until the jobs of a run have ended, then scales its servers to zero. Runs in a pod, with the standard library.

scale_down.py SCALE_PATH JOB_PATH...    paths of the Kubernetes API
"""

import json
import os
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
INTERVAL_SECONDS = 15


def call(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """GET `path`, or PATCH it with `body`; return the object. Raises OSError."""
    server = os.environ.get("KUBERNETES_API") or (
        f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    )
    headers = {"Content-Type": "application/merge-patch+json"}
    context = None
    if CREDENTIALS.exists():
        headers["Authorization"] = f"Bearer {(CREDENTIALS / 'token').read_text()}"
        context = ssl.create_default_context(cafile=CREDENTIALS / "ca.crt")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server + path, data, headers, method="GET" if data is None else "PATCH")
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        return json.load(answer)


def has_ended(job: dict[str, Any]) -> bool:
    """Return whether a Job is complete, or has failed for good."""
    conditions = job.get("status", {}).get("conditions", [])
    return any(one["type"] in ("Complete", "Failed") and one["status"] == "True" for one in conditions)


def main(scale: str, *jobs: str) -> None:
    """Poll the jobs; an unreachable API server is asked again by the next attempt of this pod."""
    while not all(has_ended(call(job)) for job in jobs):
        time.sleep(INTERVAL_SECONDS)
    call(scale, {"spec": {"replicas": 0}})
    print("the run has ended; the servers are scaled to zero")


if __name__ == "__main__":
    main(*sys.argv[1:])
