"""Redaction by Microsoft Presidio, without a network: what it finds depends on installed packages alone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

from trace_serve.errors import ConfigError

SPEC = "presidio"
_LANGUAGE = "en"
_LEAST_SCORE = 0.35
"""Weaker findings are any number of the right length: an order number would become a passport."""


def load(spec: str) -> tuple[str, Any]:
    """Name with every version that counts, and the function from text to redacted text.

    - `presidio`: what patterns and check sums tell, such as e-mail and IP addresses, phone and card numbers.
    - `presidio:MODEL`: names and places too, as an installed spaCy model finds them.

    Raises:
        ConfigError: Presidio or the model is not installed; nothing is downloaded here.
    """
    packages = ("presidio_analyzer", "presidio_anonymizer", "spacy", "tldextract")
    if any(importlib.util.find_spec(package) is None for package in packages):
        raise ConfigError(f"--redact {spec}: is not installed; install trace-serve[gate-redact]", field="redact")
    import spacy
    import tldextract
    from presidio_analyzer import AnalyzerEngine
    from presidio_analyzer.nlp_engine import SpacyNlpEngine
    from presidio_anonymizer import AnonymizerEngine

    model = spec.partition(":")[2]
    # Recognizers of addresses ask the module's own instance, which would fetch today's list of public suffixes.
    tldextract.tldextract.TLD_EXTRACTOR = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
    language = SpacyNlpEngine()
    language.nlp = {_LANGUAGE: _pipeline(spec, model) if model else spacy.blank(_LANGUAGE)}
    analyzer = AnalyzerEngine(nlp_engine=language, supported_languages=[_LANGUAGE])
    names = ["presidio-analyzer", "presidio-anonymizer", "phonenumbers", "spacy"]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    versions.append(_version(model, language.nlp[_LANGUAGE]) if model else "patterns")
    return ", ".join(versions), partial(_apply, analyzer, AnonymizerEngine())


def _pipeline(spec: str, model: str) -> Any:
    import spacy

    try:
        return spacy.load(model)
    except (OSError, ImportError, ValueError) as exc:
        raise ConfigError(
            f"--redact {spec}: {model!r} is no spaCy model that is installed; install it first, or use {SPEC} alone",
            field="redact",
        ) from exc


def _version(model: str, pipeline: Any) -> str:
    """A package's version; of a directory its digest, since anyone may have made it."""
    if Path(model).is_dir():
        from trace_serve.policy.digest import digest_directory

        return f"{Path(model).name} {digest_directory(Path(model))}"
    return f"{model} {pipeline.meta.get('version', 'unversioned')}"


def _apply(analyzer: Any, anonymizer: Any, text: str) -> str:
    found = analyzer.analyze(text=text, language=_LANGUAGE, score_threshold=_LEAST_SCORE)
    return str(anonymizer.anonymize(text=text, analyzer_results=found).text)
