"""The key file and the two forms of a peer id."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pulsenet.errors import ConfigError, RemoteProtocolError, StorageError
from pulsenet.ids import PeerId
from pulsenetd.identity import (
    from_libp2p_bytes,
    from_libp2p_text,
    is_of_small_order,
    is_on_curve,
    load,
    load_or_create,
    to_libp2p_bytes,
    to_libp2p_text,
    verify,
)
from pulsenetd.network import hivemind_repairs


def test_a_new_key_is_private_whole_and_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "key"
    old_umask = os.umask(0)
    try:
        created = load_or_create(path)
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]
    assert load_or_create(path) == created
    assert load(path).peer_id == created.peer_id


def test_two_new_keys_differ(tmp_path: Path) -> None:
    assert load_or_create(tmp_path / "a").peer_id != load_or_create(tmp_path / "b").peer_id


def test_a_signature_holds_for_its_message_and_key_only(tmp_path: Path) -> None:
    """A-AUTH-2: every flipped byte is noticed."""
    identity = load_or_create(tmp_path / "key")
    signature = identity.sign(b"message")
    assert len(signature) == 64
    assert verify(identity.peer_id, b"message", signature)
    assert not verify(identity.peer_id, b"other", signature)
    for index in range(64):
        changed = bytearray(signature)
        changed[index] ^= 1
        assert not verify(identity.peer_id, b"message", bytes(changed))
    assert not verify(PeerId(bytes(32)), b"message", signature)
    assert not verify(PeerId(b"short"), b"message", signature)
    assert not verify(identity.peer_id, b"message", b"short")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_open_to_others_is_refused_with_the_command_to_run(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    load_or_create(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
        load_or_create(path)


def test_a_damaged_key_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "key"
    load_or_create(path)
    whole = path.read_bytes()
    damaged = [b"", whole[:-1], whole + b"x", b"\xff" + whole[1:], whole[:-1] + bytes([whole[-1] ^ 1])]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(StorageError, match="damaged") as caught:
            load_or_create(path)
        assert caught.value.reason == "damaged"
        assert path.read_bytes() == data


def test_a_key_that_is_no_file_or_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a regular file"):
        load_or_create(tmp_path)
    with pytest.raises(StorageError, match="cannot write"):
        load_or_create(tmp_path / "absent" / "key")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StorageError, match="cannot read"):
        load_or_create(tmp_path / "loop")


def test_an_instance_that_lost_the_race_takes_the_other_ones_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    winner = load_or_create(tmp_path / "winner")
    really_link = os.link

    def link_late(source: str, target: str) -> None:
        (tmp_path / "winner").rename(path)
        really_link(source, target)

    monkeypatch.setattr(os, "link", link_late)
    assert load_or_create(path).peer_id == winner.peer_id


def test_peer_ids_convert_both_ways_as_hivemind_sees_them(tmp_path: Path) -> None:
    peer_id = load_or_create(tmp_path / "key").peer_id
    text = to_libp2p_text(peer_id)
    assert text.startswith("12D3Koo")
    assert from_libp2p_text(text) == peer_id
    assert from_libp2p_bytes(to_libp2p_bytes(peer_id)) == peer_id
    hivemind_id = hivemind_repairs.load_now().p2p.PeerID.from_base58(text)
    assert hivemind_id.to_bytes() == to_libp2p_bytes(peer_id)


@pytest.mark.parametrize(
    "text",
    ["", "12D3Koo", "0OIl", "Qm" + "1" * 44, "1" * 65, "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"],
)
def test_ids_of_other_keys_are_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="peer-id"):
        from_libp2p_text(text)


def test_only_points_of_the_curve_can_be_somebodys_key(tmp_path: Path) -> None:
    for number in range(8):
        assert is_on_curve(load_or_create(tmp_path / f"{number}.key").peer_id)
    assert not is_on_curve(PeerId(b"\x02" + bytes(31)))
    assert not is_on_curve(PeerId(b"\xff" * 32)), "beyond the field"


@pytest.mark.parametrize(
    "key",
    [
        "00" * 32,
        "01" + "00" * 31,
        "ec" + "ff" * 30 + "7f",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    ],
)
def test_keys_for_which_anybody_can_sign_are_known(key: str) -> None:
    """Points of a small order: the library takes signatures of theirs that need no secret."""
    weak = PeerId(bytes.fromhex(key))
    forged = bytes([1, *bytes(63)])
    assert any(verify(weak, b"message %d" % number, forged) for number in range(64))
    assert is_on_curve(weak)
    assert is_of_small_order(weak)


def test_no_key_that_was_made_is_of_small_order(tmp_path: Path) -> None:
    for number in range(8):
        assert not is_of_small_order(load_or_create(tmp_path / f"{number}.key").peer_id)
