"""Join tokens as text that survives copying."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsenet.chain.records import JoinToken
from pulsenet.chain.token import PREFIX, TEXT_SIZE_MAX, decode_token, encode_token
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import RunId

TOKEN = JoinToken(
    run_id=RunId(bytes(range(32))),
    revision_min=3,
    bootstraps=("/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW", "/dns4/example.org/tcp/4001/p2p/12D3KooX"),
    secret=b"s" * 16,
    expires_at_ms=None,
)


def test_a_token_is_one_word_that_comes_back() -> None:
    text = encode_token(TOKEN)
    assert text.isalnum()
    assert text.islower()
    assert decode_token(text) == TOKEN


def test_line_breaks_blanks_and_capitals_do_not_matter() -> None:
    text = encode_token(TOKEN).upper()
    assert decode_token(f"  {text[:40]}\r\n {text[40:]}\n") == TOKEN


def test_tokens_of_every_length_and_ending_come_back() -> None:
    for number in range(128):
        token = replace(TOKEN, revision_min=number, secret=bytes(number % 32))
        assert decode_token(encode_token(token)) == token


@pytest.mark.parametrize("size_bytes", range(5))
def test_any_changed_letter_is_noticed(size_bytes: int) -> None:
    """The last letter too, some of whose bits may say nothing."""
    text = encode_token(replace(TOKEN, bootstraps=(), secret=bytes(size_bytes)))
    for position in range(len(text)):
        is_last = position == len(text) - 1
        for letter in set("abcdefghijklmnopqrstuvwxyz234567" if is_last else "abi") - {text[position]}:
            with pytest.raises(RemoteProtocolError):
                decode_token(text[:position] + letter + text[position + 1 :])


@pytest.mark.parametrize("text", ["", "pulse", "pulse1", "pulse1a", "pulse1!!", "pulse2" + encode_token(TOKEN)[6:]])
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_token(text)
    assert caught.value.code == "token"


def test_a_cut_token_says_that_it_was_cut() -> None:
    text = encode_token(TOKEN)
    for end in range(len(PREFIX), len(text)):
        with pytest.raises(RemoteProtocolError, match="copied whole"):
            decode_token(text[:end])


def test_a_token_is_bounded_before_it_is_decoded() -> None:
    assert decode_token(encode_token(TOKEN).ljust(TEXT_SIZE_MAX)) == TOKEN
    with pytest.raises(RemoteProtocolError, match=r"^token: .* characters"):
        decode_token(encode_token(TOKEN).ljust(TEXT_SIZE_MAX + 1))


@given(st.one_of(st.text(max_size=300), st.binary(max_size=200).map(lambda data: PREFIX + _base32(data))))
def test_any_text_decodes_or_is_refused(text: str) -> None:
    try:
        decode_token(text)
    except RemoteProtocolError as error:
        assert error.code in ("token", "decode", "schema")  # noqa: PT017


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=")
