"""Imports of the other libraries that these tests compare with; what they warn of while importing is not ours."""

import importlib
import warnings
from typing import Any


def load(module: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)
