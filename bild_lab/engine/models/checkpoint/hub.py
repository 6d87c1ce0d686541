"""Check with one socket whether the Hugging Face hub is reachable, before its libraries wait for
minutes; quiet them; and note which commits were read.

With an unreachable hub a call of `huggingface_hub` takes 23 s (refused) to 389 s (packets dropped).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from bild_lab.errors import UserError
from bild_lab.files import hub_key

_commits: dict[str, str] = {}  # what `commits_read` returns
DEFAULT_ENDPOINT = "https://huggingface.co"
PROBE_TIMEOUT_S = 2.0
_TRUE_WORDS = {"1", "ON", "YES", "TRUE"}  # the values that huggingface_hub takes as true


def note_commit(name: str, revision: str | None, commit: str) -> None:
    """Note what was read of a repository of the hub. revision: as it was asked for; None: main."""
    _commits[hub_key(name, revision)] = commit


def commits_read() -> dict[str, str]:
    """The commit of every repository of the hub that this process has read so far: of models,
    tokenizers and data sets.

    Keys are those of `hub_key`.
    """
    return dict(sorted(_commits.items()))


def require_hub(what: str, remedy: str) -> None:
    """Return if the hub can be reached, within about two seconds.

    what: the thing wanted ("dataset 'wmt/wmt14'"). remedy: how to do without the hub ("give a local
    copy: dataset.path=DIR"). Raises UserError with both if the hub is unreachable or switched off.
    """
    problem = hub_problem()
    if problem is not None:
        raise UserError(f"wanted {what} from the Hugging Face hub, but {problem}; {remedy}")


def hub_problem() -> str | None:
    """Why the hub cannot be used, or None if a socket to it (or to its proxy) opens."""
    for switch in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(switch, "").upper() in _TRUE_WORDS:
            return f"{switch} is set"
    host, port = _probe_address()
    failure = _connect(host, port)
    return None if failure is None else f"{host}:{port} cannot be reached ({failure})"


def _probe_address() -> tuple[str, int]:
    """Host and port that a request to the hub would connect to first: the endpoint, or its proxy.

    Raises UserError for an endpoint or a proxy that is not a URL.
    """
    url = endpoint = os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
    parts = urllib.parse.urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and parts.hostname and not urllib.request.proxy_bypass(parts.hostname):
        url = proxy if "://" in proxy else f"http://{proxy}"
        parts = urllib.parse.urlsplit(url)
    try:
        port = (
            parts.port or {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}[parts.scheme]
        )
    except (KeyError, ValueError):
        port = None
    if parts.hostname is None or port is None:
        raise UserError(
            f"HF_ENDPOINT or its proxy must be a URL such as {DEFAULT_ENDPOINT}, got {url!r}"
        )
    return parts.hostname, port


def _connect(host: str, port: int) -> str | None:
    """Open and close a socket. Returns the failure in words, or None."""
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S).close()
            outcome.append(None)
        except OSError as error:
            outcome.append(error.strerror or str(error))

    # in a thread: getaddrinfo has no timeout, and blocks if a name server does not answer
    prober = threading.Thread(target=connect, daemon=True)
    prober.start()
    prober.join(PROBE_TIMEOUT_S)
    return outcome[0] if outcome else f"no answer in {PROBE_TIMEOUT_S:g} s"


@contextmanager
def offline_hub() -> Iterator[None]:
    """Inside the block the hub's libraries use only their cache.

    HF_HUB_OFFLINE is read once, at import, so the constants read from it are changed instead.
    Import the libraries to be called (`datasets`, `transformers`) before entering.
    """
    import huggingface_hub.constants

    modules = [huggingface_hub.constants]
    if "datasets.config" in sys.modules:
        modules.append(sys.modules["datasets.config"])
    offline_flags = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, offline_flags, strict=True):
            module.HF_HUB_OFFLINE = value


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide Transformers' own progress bars, which would garble ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def no_conversion_service() -> Iterator[None]:
    """Keep Transformers from asking a service of the hub to convert a checkpoint of pickles."""
    name = "DISABLE_SAFETENSORS_CONVERSION"
    setting = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if setting is None:
            del os.environ[name]
        else:
            os.environ[name] = setting
