"""Waits until the run has ended, then scales its servers to zero. Runs in a pod, with the standard library.

scale_down.py SCALE_PATH JOB_PATH...    paths of the Kubernetes API
"""

import json
import os
import ssl
import sys
import time
import urllib.error
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


def patiently(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Call until the API server answers. Raises HTTPError if it refuses the request, or the object is not there."""
    while True:
        try:
            return call(path, body)
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code != 429:
                raise
            print(f"{path}: {error}; trying again", flush=True)
        time.sleep(INTERVAL_SECONDS)


def conditions(job: dict[str, Any]) -> set[str]:
    """Return those of `Complete` and `Failed` that are true of a Job."""
    found = job.get("status", {}).get("conditions", [])
    return {one["type"] for one in found if one["status"] == "True"} & {"Complete", "Failed"}


def main(scale: str, *jobs: str) -> None:
    """Wait until one job has failed for good, or all are complete."""
    while True:
        found = [conditions(patiently(job)) for job in jobs]
        if all(found) or any("Failed" in one for one in found):
            break
        time.sleep(INTERVAL_SECONDS)
    patiently(scale, {"spec": {"replicas": 0}})
    print("the run has ended; the servers are scaled to zero")


if __name__ == "__main__":
    main(*sys.argv[1:])
