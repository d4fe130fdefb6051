"""What the environment says about who we are to the server: user, password, and the files of a TLS connection.

Comes in: environment variables, read each time a client is made. Goes out: options of redis-py. No secret is kept,
logged or sent anywhere else.
"""

from __future__ import annotations

import os
from pathlib import Path

from counterflow.errors import BufferUnavailable

USERNAME_VARIABLE = "COUNTERFLOW_REDIS_USERNAME"
PASSWORD_VARIABLE = "COUNTERFLOW_REDIS_PASSWORD"
PASSWORD_FILE_VARIABLE = "COUNTERFLOW_REDIS_PASSWORD_FILE"
CA_FILE_VARIABLE = "COUNTERFLOW_REDIS_CA_FILE"
CERTIFICATE_FILE_VARIABLE = "COUNTERFLOW_REDIS_CERT_FILE"
KEY_FILE_VARIABLE = "COUNTERFLOW_REDIS_KEY_FILE"

_TLS_OPTIONS = {
    CA_FILE_VARIABLE: "ssl_ca_certs",
    CERTIFICATE_FILE_VARIABLE: "ssl_certfile",
    KEY_FILE_VARIABLE: "ssl_keyfile",
}


def login() -> dict[str, str]:
    """User and password, as options of a client; absent where the environment does not name them.

    Raises:
        BufferUnavailable: the password's file cannot be read or is empty, or the password is given twice.
    """
    username, password = os.environ.get(USERNAME_VARIABLE), os.environ.get(PASSWORD_VARIABLE)
    if path := os.environ.get(PASSWORD_FILE_VARIABLE):
        if password:
            raise BufferUnavailable(f"{PASSWORD_VARIABLE} and {PASSWORD_FILE_VARIABLE} are both set: unset one of them")
        password = _read(PASSWORD_FILE_VARIABLE, path).rstrip("\r\n")
        if not password:
            raise BufferUnavailable(f"{PASSWORD_FILE_VARIABLE} {path} is empty: write the password into it")
    return {name: value for name, value in (("username", username), ("password", password)) if value}


def tls_files() -> dict[str, str]:
    """Paths of the CA, the client's certificate and its key, as options of a client; absent where not named.

    Raises:
        BufferUnavailable: a file cannot be read, or a certificate or key is named without the other.
    """
    named = {name: path for name in _TLS_OPTIONS if (path := os.environ.get(name))}
    if (CERTIFICATE_FILE_VARIABLE in named) != (KEY_FILE_VARIABLE in named):
        raise BufferUnavailable(
            f"only one of {CERTIFICATE_FILE_VARIABLE} and {KEY_FILE_VARIABLE} is set: a client's certificate needs both"
        )
    for name, path in named.items():
        _read(name, path)
    return {_TLS_OPTIONS[name]: path for name, path in named.items()}


def _read(variable: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise BufferUnavailable(f"{variable} {path} cannot be read: {reason}") from error
