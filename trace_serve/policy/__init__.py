"""Policy directories: digests, policy.json, building and checking. No torch outside `sample.py`.

What a recipe means is in `trace_serve.recipe`; who may serve a policy is decided by the server and the gate.
"""

from trace_serve.policy.build import build_policy
from trace_serve.policy.digest import digest_bytes, digest_directory, digest_file
from trace_serve.policy.manifest import Manifest, Policy, load_policy
from trace_serve.policy.model import SUPPORTED_MODEL_TYPES, ModelShape, check_recipe_fits
from trace_serve.policy.tokenizer import chat_template_digest, tokenizer_digest

__all__ = [
    "SUPPORTED_MODEL_TYPES",
    "Manifest",
    "ModelShape",
    "Policy",
    "build_policy",
    "chat_template_digest",
    "check_recipe_fits",
    "digest_bytes",
    "digest_directory",
    "digest_file",
    "load_policy",
    "tokenizer_digest",
]
