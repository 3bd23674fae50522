"""The Hugging Face Hub, or a server that speaks like it: what a repository holds at a commit, and parts of its files.

Methods block and are called from threads. Every failure is a BadModel that says what to do; neither it nor a log line
carries the token, which only ever goes to the Hub itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from gateway.errors import BadModel
from gateway.version import __version__

T = TypeVar("T")

REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")

_TIMEOUT_S = 30
_TRIES = 3


class Listing(NamedTuple):
    """A repository at a commit: path -> bytes of every file."""

    repo: str
    commit: str
    files: dict[str, int]


class Hub:
    """`endpoint` None is the public Hub. Small files that were read are kept in `cache`, by commit."""

    def __init__(self, endpoint: str | None, token: str | None, cache: Path) -> None:
        self.endpoint = endpoint.rstrip("/") if endpoint else None
        self.token = token
        self.cache = cache

    def resolve(self, repo: str, revision: str | None) -> Listing:
        """The commit that `revision` (None: the default branch) names now, and its files."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError

        if not REPOSITORY.fullmatch(repo):
            raise BadModel(f"{repo!r} is not a Hugging Face repository.", hint="It is written org/name.")
        with self.explained(repo, revision):
            api = HfApi(endpoint=self.endpoint, token=self._auth, library_name="fitserve", library_version=__version__)
            try:
                info = api.model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
                files = {sibling.rfilename: sibling.size for sibling in info.siblings or ()}
                commit = COMMIT.fullmatch(info.sha or "")
            except HFValidationError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError):
                # What the library raises on JSON that is none, or not the Hub's.
                commit, files = None, {}
        sizes = {path: size for path, size in files.items() if isinstance(size, int)}
        if commit is None or len(sizes) < len(files):
            raise BadModel(
                f"{self.place} does not answer as a Hugging Face Hub does.",
                hint="Correct FITSERVE_HF_ENDPOINT, or give a model folder on this machine.",
            )
        return Listing(repo, commit[0], sizes)

    def fetch(self, listing: Listing, name: str) -> bytes:
        """A whole small file."""
        from huggingface_hub import hf_hub_download

        with self.explained(listing.repo, listing.commit):
            path = hf_hub_download(
                listing.repo,
                name,
                revision=listing.commit,
                endpoint=self.endpoint,
                token=self._auth,
                cache_dir=self.cache,
                library_name="fitserve",
                library_version=__version__,
            )
            return Path(path).read_bytes()

    def part(self, listing: Listing, name: str, offset: int, length: int) -> bytes:
        """`length` bytes of a file from `offset` on, fewer only at its end. Never more is received than leads up to them."""
        from huggingface_hub import hf_hub_url

        with self.explained(listing.repo, listing.commit):
            url = hf_hub_url(listing.repo, name, revision=listing.commit, endpoint=self.endpoint)
            return _retried(lambda: self._part(url, offset, length))

    def _part(self, url: str, offset: int, length: int) -> bytes:
        # Not the library's parse_safetensors_file_metadata: it keeps the whole answer in memory, which is all the
        # weights where a mirror ignores Range, and it refuses headers over 25 MB.
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

        headers = build_hf_headers(token=self._auth, library_name="fitserve", library_version=__version__)
        headers |= {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S) as response:
            hf_raise_for_status(response)
            skip = 0 if response.status_code == 206 else offset
            received = bytearray()
            for chunk in response.iter_raw():
                received += chunk
                if len(received) >= skip + length:
                    break
        return bytes(received[skip : skip + length])

    @property
    def _auth(self) -> str | bool:
        # None would let the library look for a token of the user who runs us.
        return self.token or False

    @property
    def place(self) -> str:
        """The Hub's address for messages: without path and credentials."""
        from huggingface_hub import constants

        parts = urlsplit(self.endpoint or constants.ENDPOINT)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    @contextmanager
    def explained(self, repo: str, revision: str | None) -> Iterator[None]:
        """Turn the library's errors into ours. Their own words stay out: they hold addresses, some of them signed."""
        import httpx2
        from huggingface_hub import errors

        try:
            yield
        except errors.LocalEntryNotFoundError as error:
            # The library's way to say that the Hub failed and that it has no copy either.
            raise self._explain(error.__cause__ or error, repo, revision) from None
        except (errors.HfHubHTTPError, httpx2.HTTPError, httpx2.InvalidURL, errors.HFValidationError, OSError) as error:
            raise self._explain(error, repo, revision) from None

    def _explain(self, error: BaseException, repo: str, revision: str | None) -> BadModel:
        from huggingface_hub import errors

        if isinstance(error, errors.HFValidationError):
            return BadModel(f"{repo} cannot be the name of a Hugging Face repository.", hint="Check the spelling.")
        if isinstance(error, errors.GatedRepoError):
            return BadModel(
                f"{repo} is gated: its files are only for accounts that accepted its licence.",
                hint=f"Accept it at {self.place}/{repo} and set FITSERVE_HF_TOKEN to a token of that account.",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return BadModel(
                f"{repo} has no revision {revision}.", hint=f"{self.place}/{repo} lists its branches, tags and commits."
            )
        if isinstance(error, errors.RemoteEntryNotFoundError):
            return BadModel(f"A file of {repo} is gone from {self.place}.", hint="Try again; the repository changed meanwhile.")
        if isinstance(error, errors.HfHubHTTPError):
            return self._explain_status(error.response.status_code, error, repo)
        if isinstance(error, errors.OfflineModeIsEnabled):
            return BadModel(f"{self.place} is not asked, as HF_HUB_OFFLINE is set.", hint="Unset it, or give a model folder.")
        if isinstance(error, OSError) and error.errno is not None:
            where = error.filename or self.cache
            return BadModel(
                f"{where} cannot be written: {error.strerror}.", hint="Make room, or let the gateway's user write there."
            )
        return BadModel(
            f"The Hugging Face Hub at {self.place} cannot be reached, or broke off ({type(error).__name__}).",
            hint="Check the network, or give a model folder on this machine: that needs no network.",
        )

    def _explain_status(self, status: int, error: BaseException, repo: str) -> BadModel:
        from huggingface_hub import errors

        if status == 401 and self.token and not isinstance(error, errors.RepositoryNotFoundError):
            return BadModel(f"{self.place} refuses the token in FITSERVE_HF_TOKEN.", hint="Set a valid one, or none.")
        if status in (401, 404):
            return BadModel(
                f"There is no model repository {repo} at {self.place}, or it is private.",
                hint="Check the spelling; for a private one set FITSERVE_HF_TOKEN. A folder is written with a leading / or ./.",
            )
        if status == 403:
            return BadModel(
                f"{self.place} refuses access to {repo}.", hint="Set FITSERVE_HF_TOKEN to a token that may read it."
            )
        if status == 429:
            return BadModel(f"{self.place} says that we ask too often.", hint="Wait some minutes, or set FITSERVE_HF_TOKEN.")
        return BadModel(f"{self.place} answered {status} for {repo}.", hint="Try again later, or give a model folder.")


def _retried(call: Callable[[], T]) -> T:
    """`call` again when the connection or the server fails: of hundreds of shards, one hiccup must not fail them all."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    for _ in range(_TRIES - 1):
        try:
            return call()
        except httpx2.TransportError:
            continue
        except HfHubHTTPError as error:
            if error.response.status_code < 500:
                raise
    return call()
