"""From a YAML file and dotted overrides to a `RunConfig`, and back to YAML.

In: a path and `learner.lr=3e-4` texts. Out: a validated configuration, or one ConfigError with a line for each problem.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal, get_args, get_origin
from urllib.parse import parse_qs, urlsplit

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from counterflow.configs.schema import RunConfig
from counterflow.errors import ConfigError

__all__ = ["describe", "dump", "load_config"]

SECRET_ADVICE = "leave it out and set COUNTERFLOW_REDIS_USERNAME and COUNTERFLOW_REDIS_PASSWORD in the environment"
OVERRIDE_EXAMPLE = "write it as section.key=value, for example learner.lr=3e-4"
COMMENT_WIDTH = 110


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in `path` (None: the defaults) with `overrides` laid over it, validated.

    Raises:
        ConfigError: one line a problem, each with the source, the key's full path and what is allowed.
    """
    written = {} if path is None else _read_file(path)
    given = {}
    for override in overrides:
        given[override.partition("=")[0].strip()] = _read_override(override)
    tree = OmegaConf.create(written)
    try:
        for layer in given.values():
            tree = OmegaConf.merge(tree, layer)  # type: ignore[assignment]
        raw = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path or 'overrides'}: {_first_line(error)}: write a literal ${{ as \\${{") from None
    assert isinstance(raw, dict)

    def source(key: str) -> str:
        overridden = any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in given)
        return "override" if overridden else str(path or "configuration")

    problems = _secrets(raw, source)
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(problems + [_problem(dict(item), source) for item in error.errors()])) from None
    problems += list(_booleans_as_numbers(raw, config, source))
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def dump(config: RunConfig) -> str:
    """The whole configuration as plain YAML, which `load_config` reads back to an equal one."""
    return yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=COMMENT_WIDTH)


def as_data(config: RunConfig) -> dict[str, Any]:
    """The whole configuration as `dump` writes it, read back: plain data, to compare with another's."""
    data: dict[str, Any] = yaml.safe_load(dump(config))
    return data


def describe(config: RunConfig) -> str:
    """The whole configuration as YAML, with what each key means as a comment above it."""
    return "\n".join(_described(config, indent="")) + "\n"


class _Dumper(yaml.SafeDumper):
    """Quotes what OmegaConf would read as a number where YAML 1.1 would not (`3e-4`), and what folding would change."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        float(text)
        ambiguous = True
    except ValueError:
        ambiguous = not text.isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if ambiguous else None)


_Dumper.add_representer(str, _represent_text)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    return value


def _described(section: BaseModel, indent: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if not indent and name != next(iter(type(section).model_fields)):
            yield ""
        for line in textwrap.wrap(_doc(field), COMMENT_WIDTH - len(indent), break_long_words=False):
            yield f"{indent}# {line}"
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _described(value, indent + "  ")
        else:
            listed = yaml.dump(
                [_plain(value)], Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True
            )
            yield f"{indent}{name}: {listed.strip()[1:-1]}"


def _doc(field: FieldInfo) -> str:
    doc = field.description or ""
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if len(choices) > 1 and not all(str(choice) in doc for choice in choices):
        doc += f" One of {', '.join(map(str, choices))}."
    return doc


def _read_file(path: Path) -> dict[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such configuration file: check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: the configuration file cannot be read: {reason}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{path}: the file must hold sections, such as `run:` with `steps: 100` indented below it"
            )
        raw = OmegaConf.to_container(OmegaConf.create(text))
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: the configuration file cannot be read: {_first_line(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_line_of(error)}: malformed YAML: {_yaml_reason(error)}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_first_line(error)}: write a literal ${{ as \\${{") from None
    assert isinstance(raw, dict)
    # A section whose keys are all commented out reads as null, which means its defaults.
    return {key: {} if value is None and key in RunConfig.model_fields else value for key, value in raw.items()}


def _read_override(override: str) -> Any:
    key, equals, _ = override.partition("=")
    shown = _redacted(override)
    if not equals or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"override {shown}: it is not a key and a value: {OVERRIDE_EXAMPLE}")
    try:
        return OmegaConf.from_dotlist([override.strip()])
    except yaml.YAMLError as error:
        raise ConfigError(f"override {shown}: its value is malformed YAML: {_yaml_reason(error)}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"override {shown}: {_first_line(error)}: write a literal ${{ as \\${{") from None


def _secrets(raw: dict[Any, Any], source: Any) -> list[str]:
    buffer = raw.get("buffer")
    url = buffer.get("url") if isinstance(buffer, dict) else None
    if not isinstance(url, str):
        return []
    try:
        parts = urlsplit(url)
        secret = "@" in parts.netloc or {"password", "username"} & set(parse_qs(parts.query))
    except ValueError:
        return [f"{source('buffer.url')}: buffer.url: it is not a URL: write redis://host:port/0"]
    # Past a "/" or "#" in a password, urlsplit no longer sees it as one.
    if not secret and "@" not in url:
        return []
    return [f"{source('buffer.url')}: buffer.url: it may not hold a user or a password: {SECRET_ADVICE}"]


def _problem(item: dict[str, Any], source: Any) -> str:
    key = ".".join(str(part) for part in item["loc"]).removesuffix(".[key]")
    if not key and item["type"] == "value_error":
        return _conflict(str(item["msg"]).removeprefix("Value error, "), source)
    where = source(key)
    if item["type"] == "extra_forbidden":
        return f"{where}: {key}: there is no such key{_advice(key)}"
    message = str(item["msg"]).removeprefix("Value error, ")
    message = re.sub(r"^(Input|String|List|Tuple|Dictionary|Keys) should", "must", message)
    if item["type"] in ("model_type", "model_attributes_type"):
        message = f"must be a section with keys ({', '.join(_keys_below(key))})"
    if item["type"] == "value_error":
        return f"{where}: {key}: {message}"
    return f"{where}: {key}={_redacted(_text(item['input']))}: {message}"


def _conflict(message: str, source: Any) -> str:
    """Keys that are right by themselves and do not fit together: the message names them."""
    sources = {source(key) for key in _known_keys() if "." in key and re.search(rf"\b{re.escape(key)}\b", message)}
    return f"{'override' if 'override' in sources else source('')}: {message}"


def _booleans_as_numbers(raw: Any, parsed: Any, source: Any, key: str = "") -> Iterator[str]:
    """Pydantic reads true as 1; a person who wrote it meant another key."""
    if isinstance(raw, dict) and isinstance(parsed, BaseModel):
        for name, value in raw.items():
            yield from _booleans_as_numbers(value, getattr(parsed, name), source, f"{key}.{name}".lstrip("."))
    elif isinstance(raw, bool) and not isinstance(parsed, bool):
        yield f"{source(key)}: {key}={_text(raw)}: must be a number"


def _known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        # A section, or one that may be left out.
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _known_keys(kind, f"{prefix}{name}.")


def _keys_below(key: str) -> list[str]:
    prefix = f"{key}." if key else ""
    below = [name.removeprefix(prefix) for name in _known_keys() if name.startswith(prefix)]
    return [name for name in below if "." not in name]


def _advice(key: str) -> str:
    if key.startswith("buffer.") and re.search("pass|secret|user|token", key.lower()):
        return f": {SECRET_ADVICE}"
    known = list(_known_keys())
    leaf = key.rpartition(".")[2]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    nearest = same_leaf[:3] or difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if not nearest:
        by_leaf = {name.rpartition(".")[2]: name for name in known}
        nearest = [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)]
    section = key.rpartition(".")[0]
    if nearest:
        return f": did you mean {' or '.join(nearest)}?"
    return f": {section or 'the configuration'} has {', '.join(_keys_below(section))}" if _keys_below(section) else ""


def _redacted(text: str) -> str:
    """Without anything that could be a secret in a URL."""
    return re.sub(r"://\S*@|(?<=[?&])(password|username)=\S*", "://***@", text)


def _text(value: Any) -> str:
    listed = yaml.dump([_plain(value)], Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True)
    text = " ".join(value.split()) if isinstance(value, str) else listed.strip()[1:-1]
    return text if len(text) <= 80 else text[:77] + "..."


def _line_of(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}" if mark else ""


def _yaml_reason(error: yaml.YAMLError) -> str:
    return _redacted(str(getattr(error, "problem", None) or _first_line(error)))


def _first_line(error: Exception) -> str:
    return _redacted(str(error).partition("\n")[0])
