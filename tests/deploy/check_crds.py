"""Holds the custom resources of deploy/ against models that npm packages generate from their projects' sources.

    python tests/deploy/check_crds.py

Needs npm and its registry. LeaderWorkerSet has no such package; tests/deploy/schemas alone checks it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))

import manifests

PACKAGES = (
    "@kubernetes-models/argo-rollouts@2.0.0",
    "@kubernetes-models/keda@2.0.0",
    "@kubernetes-models/prometheus-operator@6.0.0",
)


def objects() -> list[dict[str, object]]:
    """What the chart makes of every set of values, and the files of deploy/argo."""
    found = []
    for path in sorted((manifests.CHART / "ci").glob("*.yaml")):
        found += manifests.render(yaml.safe_load(path.read_text("utf-8")))
    for path in sorted((manifests.ROOT / "deploy/argo").glob("*.yaml")):
        found += [each for each in manifests.documents(path.read_text("utf-8")) if each["kind"] != "Kustomization"]
    return found


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="trace-serve-crds-") as scratch:
        Path(scratch, "package.json").write_text('{"private": true, "type": "module"}')
        subprocess.run(["npm", "install", "--silent", "--ignore-scripts", *PACKAGES], cwd=scratch, check=True)
        shutil.copy(Path(__file__).with_suffix(".mjs"), scratch)
        done = subprocess.run(["node", "check_crds.mjs"], cwd=scratch, input=json.dumps(objects()), text=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
