"""Salts of prefix-cache entries, and the reserved prefix of request ids; for the HTTP server and the engines."""

CANARY_PREFIX = "canary-"
"""Prefix of the request ids of the server's own canaries, followed by a secret.

The scheduler gives a canary priority, so requests of clients under this prefix are refused."""


def make_salt(content_hash: str, client_salt: str | None) -> str:
    """Return the prefix-cache salt of a request: the hash of the weights, then the client's own salt.

    The client's salt never stands alone, so no client can read entries of other weights (I5). A content hash contains
    no colon.
    """
    return f"{content_hash}:{client_salt}" if client_salt else content_hash


def replace_hash(content_hash: str, salt: str | None) -> str:
    """Replace the hash in a salt of `make_salt`. Any other salt is kept behind `content_hash`."""
    return make_salt(content_hash, (salt or "").partition(":")[2])
