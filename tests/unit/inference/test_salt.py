"""I5: no salt without the hash of the weights."""

from hypothesis import given
from hypothesis import strategies as st

from prime_rl.inference.salt import mix, remix

hashes = st.text("0123456789abcdef", min_size=32, max_size=32)
client_salts = st.one_of(st.none(), st.text(min_size=1, max_size=20))


@given(hashes, hashes, client_salts, client_salts)
def test_salts_are_equal_only_for_equal_weights_and_equal_clients(
    one: str, other: str, mine: str | None, yours: str | None
) -> None:
    assert (mix(one, mine) == mix(other, yours)) == (one == other and (mine or "") == (yours or ""))


@given(hashes, hashes, client_salts)
def test_remix_exchanges_the_hash_alone(old: str, new: str, client: str | None) -> None:
    assert remix(new, mix(old, client)) == mix(new, client)
    assert remix(old, mix(old, client)) == mix(old, client)


@given(hashes, st.one_of(st.none(), st.text()))
def test_remix_of_anything_starts_with_the_hash(content_hash: str, salt: str | None) -> None:
    assert remix(content_hash, salt).partition(":")[0] == content_hash
