"""I5: the salt of a prefix-cache entry is the content hash of the weights that computed it.

A client may bring a salt of its own (to keep tenants apart, say). It is appended to the hash and never stands alone,
so no client can reach an entry of other weights. A content hash holds no colon, which makes the two parts separable.
"""

CANARY = "canary-"
"""How the name of a request begins with which the server looks at what it has loaded (`canary`)."""


def mix(content_hash: str, client_salt: str | None) -> str:
    """Return the salt of a request: the hash of the weights that will prefill it, then what the client sent."""
    return f"{content_hash}:{client_salt}" if client_salt else content_hash


def remix(content_hash: str, salt: str | None) -> str:
    """Exchange the hash in a salt that `mix` made. Any other salt still ends up behind `content_hash`."""
    return mix(content_hash, (salt or "").partition(":")[2])
