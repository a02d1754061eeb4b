"""What goes wrong with a store on the network, in words: which errors are its client's, and which no patience mends."""

from __future__ import annotations

import errno

_CLIENTS = ("botocore", "aiobotocore", "aiohttp", "gcsfs")
"""Packages whose errors are no ``OSError``."""
_CREDENTIALS = (
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound", "NoRegionError",
    "TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "InvalidConfigError",
)  # fmt: skip
_LASTING = (errno.EINVAL, errno.EPERM, errno.ENAMETOOLONG, getattr(errno, "EREMCHG", errno.EINVAL))
"""What s3fs makes of a bucket's name that can be none, a token that is none, a bucket in another region."""
HINT = "credentials come from the usual environment, on every node, such as AWS_ACCESS_KEY_ID or AWS_PROFILE"


def is_client_error(error: BaseException) -> bool:
    """Whether the error is one that a store's client raises by itself, beside Python's own."""
    return type(error).__module__.split(".")[0] in _CLIENTS


def is_refusal(error: BaseException) -> bool:
    """Whether the store does not let this user in: the credentials are missing or wrong, or give no right to this."""
    return isinstance(error, PermissionError) or type(error).__name__ in _CREDENTIALS


def is_lasting(error: BaseException) -> bool:
    """Whether the same request would fail again, however often it is made."""
    if is_refusal(error) or isinstance(error, FileNotFoundError | FileExistsError):
        return True
    return isinstance(error, OSError) and error.errno in _LASTING


def lacks_bucket(error: BaseException) -> bool:
    """Whether a ``FileNotFoundError`` means that not even the bucket is there."""
    answer = getattr(error.__cause__, "response", None)
    return isinstance(answer, dict) and answer.get("Error", {}).get("Code") == "NoSuchBucket"


def reason_of(error: BaseException) -> str:
    """The error's own words, on one line and without a full stop; a refusal says where credentials come from."""
    text = (str(error).splitlines() or [""])[0].strip().rstrip(".") or type(error).__name__
    return f"{text} ({HINT})" if is_refusal(error) else text
