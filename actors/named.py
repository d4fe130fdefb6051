"""What a configuration names as `package.module:attribute`, found by import.

Flows in: the name. Flows out: a function or class, or one ConfigError that says why there is none.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from counterflow.actors.reward_process import describe
from counterflow.errors import ConfigError


def import_named(key: str, name: str) -> Any:
    """The callable that `key` names.

    Raises:
        ConfigError: it cannot be imported, or cannot be called.
    """
    module_name, _, attribute = name.partition(":")
    # Last, so that a file here never hides an installed module.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"{key} = {name}: {module_name} cannot be imported ({describe(error)}); "
            f"it must be installed or lie in {Path.cwd()}"
        ) from error
    where = getattr(module, "__file__", None) or module_name
    if not hasattr(module, attribute):
        raise ConfigError(f"{key} = {name}: {where} has no {attribute}")
    if not callable(found := getattr(module, attribute)):
        raise ConfigError(f"{key} = {name}: {attribute} in {where} cannot be called")
    return found
