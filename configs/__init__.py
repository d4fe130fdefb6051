"""The configuration of a run: its schema, and the way from YAML and overrides to it. Imports nothing that computes."""

from counterflow.configs.load import as_data, describe, dump, load_config
from counterflow.configs.schema import RunConfig

__all__ = ["RunConfig", "as_data", "describe", "dump", "load_config"]
