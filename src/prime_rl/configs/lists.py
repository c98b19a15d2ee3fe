"""Types of lists, which can be typed as `a,b`."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator


def split_commas(value: object) -> object:
    """Split `a,b` into a list, so that lists can be typed without brackets."""
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


def check_urls(urls: list[str]) -> list[str]:
    """Return the URLs; raise ValueError if one is no HTTP URL."""
    for url in urls:
        try:
            parts = urlsplit(url)
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port above 65535
            is_valid = False
        if not is_valid:
            raise ValueError(f"{url} is not a URL such as http://localhost:8000/v1")
    return urls


StrList = Annotated[list[str], BeforeValidator(split_commas)]
UrlList = Annotated[StrList, AfterValidator(check_urls)]
IntList = Annotated[list[int], BeforeValidator(split_commas)]
