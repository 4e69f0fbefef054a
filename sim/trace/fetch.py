"""Public traces, fetched once into the user's cache and checked against a recorded sha256."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sim.errors import InputError, suggestion

_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/{commit}/FAST25-release/traces/{file}"
_AZURE = (
    "https://raw.githubusercontent.com/Azure/AzurePublicDataset/"
    "790921015d50dd6aae7f7e47f39ba0e235ad6b08/data/AzureLLMInferenceTrace_{name}.csv"
)


class Source(NamedTuple):
    """A file on the web. The sha256 is of the copy that the tests of this project read, unzipped."""

    url: str
    sha256: str
    licence: str
    what: str


SOURCES: dict[str, Source] = {
    "mooncake_conversation": Source(
        _MOONCAKE.format(commit="a2a4b18ac537fd798d50e6e9f57031ce86419a37", file="conversation_trace.jsonl"),
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        "Apache-2.0",
        "an hour of chat, 12,031 requests, ids of 512 tokens",
    ),
    "mooncake_synthetic": Source(
        _MOONCAKE.format(commit="3cca71daccf2a7afb8fe3f0295358f70e3a69fdb", file="synthetic_trace.jsonl"),
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
        "Apache-2.0",
        "synthetic mix, 3,993 requests, ids of 512 tokens",
    ),
    "azure_2023_code": Source(
        _AZURE.format(name="code"),
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        "CC-BY-4.0",
        "code completion, 8,819 arrivals and lengths",
    ),
    "azure_2023_conv": Source(
        _AZURE.format(name="conv"),
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        "CC-BY-4.0",
        "conversation, 19,366 arrivals and lengths",
    ),
}


def fetch(name: str, sources: Mapping[str, Source] = SOURCES) -> Path:
    """Return the path of a trace in the user's cache, downloaded if it is not there yet.

    Raises InputError for an unknown name, a server that does not answer, or a file whose sha256 is
    another: nothing is kept of it.
    """
    import pooch
    import requests

    if name not in sources:
        raise InputError(f"trace fetch: unknown trace {name!r}{suggestion(name, sources)}")
    source = sources[name]
    pooch.get_logger().setLevel("WARNING")
    try:
        found = pooch.retrieve(
            source.url,
            known_hash=f"sha256:{source.sha256}",
            fname=f"{name}{Path(source.url).suffix}",
            path=pooch.os_cache("prefixsim") / "traces",
            downloader=pooch.HTTPDownloader(timeout=30),
        )
    except requests.RequestException as error:
        status = getattr(error.response, "status_code", None)
        reason = f"status {status}" if status else type(error).__name__
        raise InputError(
            f"trace fetch: {source.url} cannot be fetched ({reason}): try again, or download it yourself"
        ) from None
    except ValueError as error:
        if "hash" not in str(error):
            raise
        raise InputError(
            f"trace fetch: {source.url} is not the file that was recorded (its sha256 differs):"
            " download it yourself if you trust it"
        ) from None
    return Path(found)
