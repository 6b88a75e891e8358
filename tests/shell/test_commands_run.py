"""``pulsenet run``: a run is created, shown and changed, and every change is a revision the trust rules accept."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from pulsenet.chain.records import Descriptor
from pulsenet.chain.signing import record_digest, seal
from pulsenet.chain.token import decode_token
from pulsenet.chain.trust import Trust
from pulsenet.ids import PeerId, RunId
from pulsenet.wire.schema import decode_value
from pulsenetd import cli, runs
from pulsenetd.identity import Identity, is_on_curve, load_or_create, to_libp2p_text, verify

PEER = "/ip4/10.0.0.1/tcp/4001/p2p/"


class Shell:
    """Runs commands on a machine of its own."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home = directory / "data" / "pulsenet"
        self.keys = directory / "keys"
        self.keys.mkdir()
        self._capsys = capsys

    def key(self, name: str) -> Identity:
        return load_or_create(self.keys / f"{name}.key")

    def text(self, name: str) -> str:
        return to_libp2p_text(self.key(name).peer_id)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        code = cli.main(["run", *arguments])
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err

    def ok(self, *arguments: str) -> Any:
        code, out, err = self.run(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    def fails(self, code: int, text: str, *arguments: str) -> None:
        found, out, err = self.run(*arguments)
        assert (found, out) == (code, "")
        assert text in err
        assert len(err.splitlines()) == 1

    def create(self, *arguments: str) -> Any:
        return self.ok("create", "mine", "--authority", self.text("authority"), *arguments)

    def trust(self, name: str = "mine") -> Trust:
        """What a newcomer believes after walking the revisions on disk."""
        records = runs.load_descriptors(self.home / name)
        trust = Trust(RunId(record_digest(records[0])), verify)
        for signed in records:
            trust.accept_descriptor(signed)
        return trust

    def descriptor(self) -> Descriptor:
        descriptor = self.trust().descriptor
        assert descriptor is not None
        return descriptor


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return Shell(tmp_path, capsys)


# Creating


def test_a_created_run_lists_its_keys_and_prints_a_token_that_names_it(shell: Shell) -> None:
    bootstrap = PEER + shell.text("authority")
    made = shell.create(
        "--trainer", shell.text("trainer"), "--inferencer", shell.key("inferencer").peer_id.hex(),
        "--open-inferencers", "3", "--private", "--anchor-interval", "7", "--publish-interval", "1.5",
        "--bootstrap", bootstrap,
    )  # fmt: skip
    descriptor = shell.descriptor()
    assert descriptor.authorities == (shell.key("authority").peer_id,)
    assert descriptor.trainers == (shell.key("trainer").peer_id,)
    assert descriptor.inferencers == (shell.key("inferencer").peer_id,)
    assert (descriptor.open_inferencers_max, descriptor.private) == (3, True)
    assert (descriptor.anchor_interval, descriptor.publish_interval_min_ms) == (7, 1500)
    token = decode_token(made["token"])
    assert token.run_id == shell.trust().run_id == bytes.fromhex(made["run_id"])
    assert token.bootstraps == (bootstrap,)
    assert (len(token.secret), token.expires_at_ms) == (16, None)
    assert made["dir"] == str(shell.home / "mine")
    owner = shell.home / "mine" / "owner.key"
    assert owner.stat().st_mode & 0o777 == 0o600


def test_authorities_contribute_unless_trainers_are_named(shell: Shell) -> None:
    shell.create()
    descriptor = shell.descriptor()
    assert descriptor.trainers == descriptor.authorities
    assert not descriptor.private
    assert runs.read_run_file(shell.home / "mine" / "run.json").token.secret == b""


def test_a_token_may_expire(shell: Shell) -> None:
    before = time.time()
    expires_at_ms = decode_token(shell.create("--expires", "2")["token"]).expires_at_ms
    assert expires_at_ms is not None
    assert 7_199 <= expires_at_ms / 1000 - before <= 7_260


def test_a_token_that_ended_is_followed_by_a_new_one(shell: Shell) -> None:
    address = PEER + shell.text("authority")
    old = decode_token(shell.create("--private", "--expires", "2", "--bootstrap", address)["token"])
    assert decode_token(shell.ok("token", "mine")["token"]) == replace(old, expires_at_ms=None)
    other = PEER + shell.text("other")
    before = time.time()
    code, out, err = shell.run("token", "mine", "--expires", "48", "--bootstrap", other)
    assert code == 0
    assert re.fullmatch(r"the token ends \d{4}-\d\d-\d\d \d\d:\d\d UTC\n", err)
    renewed = decode_token(out)
    assert renewed.expires_at_ms is not None
    assert 172_799 <= renewed.expires_at_ms / 1000 - before <= 172_860
    assert (renewed.run_id, renewed.secret, renewed.bootstraps) == (old.run_id, old.secret, (other,))
    assert runs.read_run_file(shell.home / "mine" / "run.json").token == renewed
    assert decode_token(shell.ok("show", "mine")["token"]) == renewed


def test_people_are_told_when_a_token_ends(shell: Shell) -> None:
    """Who only wants to see the token would take its end away, and not know."""
    shell.create()
    assert shell.ok("show", "mine")["token_expires_at_ms"] is None
    code, _, err = shell.run("token", "mine")
    assert (code, err) == (0, "the token never ends; --expires gives it an end\n")
    assert re.search(r"^token_ends +never$", shell.run("show", "mine")[1], re.MULTILINE)
    path = shell.home / "mine" / "run.json"
    file = runs.read_run_file(path)
    runs.write_run_file(path, replace(file, token=replace(file.token, expires_at_ms=1_796_130_000_000)))
    assert shell.ok("show", "mine")["token_expires_at_ms"] == 1_796_130_000_000
    runs.write_run_file(path, replace(file, token=replace(file.token, expires_at_ms=1_000)))
    told = "1970-01-01 00:00 UTC, and nobody joins by it any more: 'pulsenet run token mine' makes another"
    assert f"token_ends                 {told}\n" in shell.run("show", "mine")[1]


@pytest.mark.parametrize(
    ("code", "arguments", "text"),
    [
        (2, ["mine", "--expires", "nan"], "--expires: nan is not from 0 to 87600"),
        (2, ["mine", "--bootstrap", "here"], "'here'"),
        (78, ["theirs"], "no run in"),
    ],
)
def test_a_token_that_cannot_be_leaves_the_old_one(shell: Shell, code: int, arguments: list[str], text: str) -> None:
    token = shell.create()["token"]
    shell.fails(code, text, "token", *arguments)
    assert shell.ok("show", "mine")["token"] == token
    (shell.home / "mine" / "run.json").unlink()
    shell.fails(78, "join with --token again", "token", "mine")


def test_people_are_told_what_to_keep_and_what_to_give_away(shell: Shell) -> None:
    code, out, err = shell.run("create", "mine", "--authority", shell.text("authority"))
    assert (code, err) == (0, "")
    assert "owner.key safe" in out
    assert "join token: pulse1" in out
    assert "pulsenet join --role trainer --run mine --data-dir" in out


def test_a_token_that_holds_an_address_needs_no_advice(shell: Shell) -> None:
    bootstrap = "/ip4/203.0.113.7/tcp/4001/p2p/" + shell.text("authority")
    code, out, _ = shell.run("create", "mine", "--authority", shell.text("authority"), "--bootstrap", bootstrap)
    assert code == 0
    assert "no address yet" not in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bad name"], "'bad name' is not a run name"),
        (["mine"], "--authority: name at least one key"),
        (["mine", "--authority", "12D3nonsense"], "'12D3nonsense' is not a key"),
        (["mine", "--authority", "x" * 64], "is not a key"),
        (["mine", "--authority", "OWN", "--trainer", "nobody"], "'nobody' is not a key"),
        (["mine", "--authority", "02" + "00" * 31], "is nobody's key: copy it again"),
        (["mine", "--authority", "00" * 32], "is nobody's key: copy it again"),
        (["mine", "--authority", "OWN", "--trainer", "02" + "00" * 31], "is nobody's key"),
        (["mine", "--authority", "OWN", "--anchor-interval", "0"], "--anchor-interval: 0"),
        (["mine", "--authority", "OWN", "--anchor-interval", str(2**70)], "is not from 1 to"),
        (["mine", "--authority", "OWN", "--open-inferencers", "-1"], "--open-inferencers: -1 is not from 0 to"),
        (["mine", "--authority", "OWN", "--publish-interval", "-1"], "--publish-interval: -1"),
        (["mine", "--authority", "OWN", "--publish-interval", "nan"], "--publish-interval: nan"),
        (["mine", "--authority", "OWN", "--publish-interval", "inf"], "--publish-interval: inf"),
        (["mine", "--authority", "OWN", "--expires", "-2"], "--expires: -2"),
        (["mine", "--authority", "OWN", "--expires", "nan"], "--expires: nan"),
        (["mine", "--authority", "OWN", "--bootstrap", "/ip4/10.0.0.1/tcp/1"], "--bootstrap"),
        (["mine", *(f"--authority={number:064x}" for number in range(128))], "--authority: 128 keys, at most 127"),
        (["mine", "--authority", "OWN", *(f"--trainer={number:064x}" for number in range(1025))], "--trainer: 1025"),
    ],
)
def test_what_makes_no_run_is_refused_and_nothing_is_written(shell: Shell, arguments: list[str], text: str) -> None:
    own = shell.text("authority")
    shell.fails(2, text, "create", *(own if word == "OWN" else word for word in arguments))
    assert not shell.home.exists()


def test_who_makes_a_run_is_told_where_a_token_with_an_address_comes_from(shell: Shell) -> None:
    """Nodes do not say the token of a private run, which holds its secret."""
    arguments = ("--authority", shell.text("authority"))
    assert "a node started here prints one" in shell.run("create", "open", *arguments)[1]
    _, told, _ = shell.run("create", "secret", "--private", *arguments)
    assert "'pulsenet run show secret' prints one" in told
    assert "node started here prints" not in told
    bootstrap = ("--bootstrap", PEER + shell.text("authority"))
    assert "no address" not in shell.run("create", "found", *bootstrap, *arguments)[1]


def test_a_promoted_key_is_not_taken_for_a_trainer_of_rounds(shell: Shell) -> None:
    """It may publish; what it contributes counts only once it is admitted, and nothing else would say so."""
    shell.create("--algorithm", "pulseloco")
    hint = "pulsenet run admit mine {} --role trainer"
    assert hint.format(shell.text("second")) in shell.run("promote", "mine", shell.text("second"))[1]
    shell.ok("admit", "mine", shell.text("third"), "--role", "trainer")
    assert "run admit" not in shell.run("promote", "mine", shell.text("third"))[1]
    shell.ok("create", "plain", "--authority", shell.text("authority"))
    assert "run admit" not in shell.run("promote", "plain", shell.text("second"))[1]


def test_a_run_is_never_created_over_another(shell: Shell) -> None:
    made = shell.create()
    shell.fails(78, "exists already", "create", "mine", "--authority", shell.text("authority"))
    assert shell.ok("show", "mine")["run_id"] == made["run_id"]


def test_what_is_refused_leaves_no_key_where_the_owners_was_taken_offline(shell: Shell) -> None:
    """Later commands would take a key that owns nothing for the owner's."""
    shell.create()
    (shell.home / "mine" / "owner.key").rename(shell.keys / "offline.key")
    shell.fails(78, "exists already", "create", "mine", "--authority", shell.text("authority"))
    shell.fails(78, "no owner key at", "admit", "mine", shell.text("newcomer"), "--role", "trainer")


# Showing


def test_a_run_whose_file_is_gone_is_said_with_what_to_do(shell: Shell) -> None:
    """As after it was deleted because it was damaged."""
    shell.create()
    (shell.home / "mine" / "run.json").unlink()
    shell.fails(78, "run.json, which holds the token, is gone; join with --token again", "show", "mine")


def test_a_run_is_shown_to_people_and_to_programs(shell: Shell) -> None:
    made = shell.create()
    table = shell.ok("show", "mine")
    assert (table["run_id"], table["revision"]) == (made["run_id"], 0)
    assert table["authorities"] == [shell.text("authority")]
    assert table["token"] == made["token"]
    code, out, err = shell.run("show", "mine")
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["authorities"] == shell.text("authority")
    assert lines["inferencers"] == "-"
    assert lines["revision"] == "0"


def test_the_name_an_owner_gave_a_run_cannot_colour_a_terminal(shell: Shell) -> None:
    shell.create()
    path = shell.home / "mine"
    owner = load_or_create(path / "owner.key")
    (genesis,) = runs.load_descriptors(path)
    named = replace(decode_value(Descriptor, genesis.payload), name="\x1b[2J\nrun_id   another")
    runs.save_descriptor(path, seal(named, owner.sign, owner.peer_id))
    code, out, _ = shell.run("show", "mine")
    assert code == 0
    assert "\\x1b[2J\\nrun_id   another" in out
    assert "\x1b" not in out


def test_a_shown_token_leads_to_the_nodes_that_run_here(shell: Shell) -> None:
    shell.create()
    path = shell.home / "mine" / "run.json"
    live = PEER + shell.text("authority")
    runs.write_run_file(path, replace(runs.read_run_file(path), bootstraps=(live,)))
    assert decode_token(shell.ok("show", "mine")["token"]).bootstraps == (live,)


def test_a_run_that_is_not_here_is_named_with_the_next_step(shell: Shell) -> None:
    shell.fails(78, "create it with 'pulsenet run create' or join it first", "show", "nothing")
    shell.fails(78, "create it with 'pulsenet run create' or join it first", "show")
    shell.fails(78, "no owner key", "admit", "nothing", shell.text("x"), "--role", "trainer")


# Changing


def test_keys_are_admitted_promoted_and_revoked_revision_by_revision(shell: Shell) -> None:
    shell.create()
    new = shell.key("new").peer_id
    done = shell.ok("admit", "mine", shell.text("new"), "--role", "trainer")
    assert done == {"revision": 1, "complete": True}
    assert new in shell.descriptor().trainers
    shell.ok("admit", "mine", new.hex(), "--role", "inferencer")
    assert shell.descriptor().inferencers == (new,)
    shell.ok("promote", "mine", new.hex())
    assert new in shell.descriptor().authorities
    assert shell.ok("revoke", "mine", new.hex())["revision"] == 4
    descriptor = shell.descriptor()
    assert not {new} & {*descriptor.authorities, *descriptor.trainers, *descriptor.inferencers}
    assert descriptor.revision == 4


def test_people_are_told_that_running_nodes_follow(shell: Shell) -> None:
    shell.create()
    code, out, err = shell.run("promote", "mine", shell.text("new"))
    assert (code, err) == (0, "")
    assert "revision 1 signed; running nodes of this machine pass it on" in out


def test_a_key_that_nobody_can_sign_with_is_not_listed_and_one_that_was_can_be_removed(shell: Shell) -> None:
    shell.create()
    odd = "02" + "00" * 31
    for action in (("admit", "--role", "trainer"), ("promote",), ("own",)):
        shell.fails(2, "is nobody's key", action[0], "mine", odd, *action[1:])
    assert shell.descriptor().revision == 0
    shell.fails(2, "the run says so already", "revoke", "mine", odd)


def test_the_last_authority_stays_until_another_is_promoted(shell: Shell) -> None:
    shell.create()
    shell.fails(2, "promote another key before revoking it", "revoke", "mine", shell.text("authority"))
    shell.ok("promote", "mine", shell.text("second"))
    shell.ok("revoke", "mine", shell.text("authority"))
    assert shell.descriptor().authorities == (shell.key("second").peer_id,)


def test_an_authority_too_many_is_refused_before_it_is_signed(shell: Shell) -> None:
    """More than half of 128 are more than one record's signatures: no receipt would ever be final."""
    keys = filter(is_on_curve, (PeerId(bytes([number]) * 32) for number in range(1, 256)))
    shell.ok("create", "mine", *(f"--authority={key.hex()}" for key in islice(keys, 127)))
    told = "128 authorities, at most 127 can be listed; revoke one that is not needed first"
    shell.fails(2, told, "promote", "mine", shell.text("other"))
    assert len(shell.descriptor().authorities) == 127


def test_a_change_that_changes_nothing_makes_no_revision(shell: Shell) -> None:
    shell.create()
    shell.fails(2, "nothing was changed", "revoke", "mine", shell.text("stranger"))
    shell.fails(2, "nothing was changed", "promote", "mine", shell.text("authority"))
    shell.fails(2, "nothing was changed", "admit", "mine", shell.text("authority"), "--role", "trainer")
    assert shell.descriptor().revision == 0


def test_only_the_owners_key_changes_a_run(shell: Shell) -> None:
    shell.create()
    arguments = ("promote", "mine", shell.text("new"), "--owner-key")
    told = f"{shell.text('stranger')} does not own this run; name an owner's key with --owner-key FILE"
    shell.fails(78, told, *arguments, str(shell.key("stranger").path))
    shell.fails(78, "no owner key at /nowhere/key", *arguments, "/nowhere/key")
    moved = (shell.home / "mine" / "owner.key").rename(shell.keys / "safe.key")
    shell.fails(78, "no owner key", *arguments[:3])
    shell.ok(*arguments, str(moved))
    assert shell.descriptor().revision == 1


# Several owners


def create_shared(shell: Shell) -> None:
    """A run of two owners, both of whom have to sign."""
    first, second = shell.key("first"), shell.key("second")
    owners = tuple(sorted((first.peer_id, second.peer_id)))
    authority = shell.key("authority").peer_id
    genesis = runs.genesis(
        "mine",
        nonce=bytes(16),
        owner=first.peer_id,
        authorities=[authority],
        trainers=[authority],
        inferencers=[],
        open_inferencers_max=0,
        private=False,
        anchor_interval=10,
        publish_interval_min_ms=0,
    )
    shared = replace(genesis, owners=owners, owner_threshold=2)
    path = shell.home / "mine"
    runs.create_run(path, shared, sign=first.sign, owner=first.peer_id, bootstraps=(), secret=b"", expires_at_ms=None)
    runs.countersign(path, sign=second.sign, owner=second.peer_id)


def owner(shell: Shell, name: str) -> tuple[str, str]:
    return ("--owner-key", str(shell.key(name).path))


def test_a_revision_of_several_owners_waits_for_all_of_them(shell: Shell) -> None:
    create_shared(shell)
    code, out, _ = shell.run("promote", "mine", shell.text("new"), *owner(shell, "first"))
    assert code == 0
    assert not shell.ok("show", "mine")["complete"]
    assert "1, which lacks signatures of owners: it does not count yet\n" in shell.run("show", "mine")[1]
    files = shell.home / "mine" / "descriptors"
    told = f"give the other owners {files}; they run 'pulsenet run countersign mine' and give it back"
    assert out == f"revision 1 has 1 of 2 signatures: {told}\n"
    assert shell.run("countersign", "mine", *owner(shell, "first"))[:2] == (0, out)
    code, out, _ = shell.run("countersign", "mine", *owner(shell, "second"))
    told = "revision 1 has 2 of 2 signatures; running nodes of this machine pass it on within a minute\n"
    assert (code, out) == (0, told)
    assert shell.ok("countersign", "mine", *owner(shell, "second")) == {"signatures": 2, "needed": 2}
    assert shell.key("new").peer_id in shell.descriptor().authorities


def test_owners_are_added_and_removed_with_their_threshold(shell: Shell) -> None:
    shell.create()
    assert shell.ok("own", "mine", shell.text("second"), "--threshold", "2")["complete"]
    assert (len(shell.descriptor().owners), shell.descriptor().owner_threshold) == (2, 2)
    told = "--threshold: 2 owners cannot give 3 signatures; give a number from 1 to 2"
    shell.fails(2, told, "own", "mine", shell.text("second"), "--threshold", "3")
    told = "--threshold: 1 owner cannot give 2 signatures; give a number from 1 to 1"
    shell.fails(2, told, "disown", "mine", shell.text("second"))
    assert not shell.ok("disown", "mine", shell.text("second"), "--threshold", "1")["complete"]
    shell.ok("countersign", "mine", *owner(shell, "second"))
    assert (len(shell.descriptor().owners), shell.descriptor().owner_threshold) == (1, 1)
    shell.fails(78, "does not own this run", "promote", "mine", shell.text("new"), *owner(shell, "second"))


def test_a_stranger_cannot_spoil_a_revision_with_a_signature(shell: Shell) -> None:
    create_shared(shell)
    shell.run("promote", "mine", shell.text("new"), *owner(shell, "first"))
    shell.fails(78, "does not own this run", "countersign", "mine", *owner(shell, "stranger"))
    shell.ok("countersign", "mine", *owner(shell, "second"))
    assert shell.descriptor().revision == 1


def test_nothing_is_built_on_a_revision_that_lacks_signatures(shell: Shell) -> None:
    """Only the newest revision can be countersigned: one below it would be lost for ever."""
    create_shared(shell)
    shell.run("promote", "mine", shell.text("new"), *owner(shell, "first"))
    shell.fails(78, "revision 1 lacks signatures", "promote", "mine", shell.text("other"), *owner(shell, "first"))
    shell.ok("countersign", "mine", *owner(shell, "second"))
    shell.run("promote", "mine", shell.text("other"), *owner(shell, "first"))
    shell.ok("countersign", "mine", *owner(shell, "second"))
    assert shell.descriptor().revision == 2


def test_a_revision_that_other_owners_do_not_sign_can_be_taken_back(shell: Shell) -> None:
    create_shared(shell)
    shell.fails(78, "revision 0 counts already", "withdraw", "mine")
    shell.run("promote", "mine", shell.text("wrong"), *owner(shell, "first"))
    told = "or take it back with 'pulsenet run withdraw'"
    shell.fails(78, told, "promote", "mine", shell.text("new"), *owner(shell, "first"))
    code, out, _ = shell.run("withdraw", "mine")
    assert (code, out.splitlines()[0]) == (0, "revision 1 is taken back here")
    assert "delete their copies" in out
    shell.run("promote", "mine", shell.text("new"), *owner(shell, "first"))
    assert shell.ok("withdraw", "mine") == {"withdrawn": 1}
    shell.run("promote", "mine", shell.text("new"), *owner(shell, "first"))
    shell.ok("countersign", "mine", *owner(shell, "second"))
    assert shell.key("new").peer_id in shell.descriptor().authorities
    assert shell.key("wrong").peer_id not in shell.descriptor().authorities
    shell.fails(78, "revision 1 counts already", "withdraw", "mine")
    shell.fails(78, "no run in", "withdraw", "nothing")


def test_a_run_that_is_not_here_cannot_be_countersigned(shell: Shell) -> None:
    shell.fails(78, "no run in", "countersign", "mine", *owner(shell, "first"))


def test_a_damaged_revision_is_named(shell: Shell) -> None:
    shell.create()
    path = shell.home / "mine" / "descriptors" / "000000.record"
    path.write_bytes(path.read_bytes()[:-1])
    shell.fails(6, "000000.record is damaged", "show", "mine")


# Where the run goes on


ROOT = "ab" * 32


def test_an_epoch_of_the_owner_says_what_counts_and_what_comes_next(shell: Shell) -> None:
    shell.create()
    assert shell.ok("epoch", "mine", "--keep", "0.57", "--root", ROOT) == {
        "epoch": 1,
        "first_number": 58,
        "complete": True,
    }
    code, out, _ = shell.run("epoch", "mine", "--keep", "1.60", "--root", ROOT, "--first-number", "100")
    assert code == 0
    assert "epoch 2 signed: what came after version 1.60 does not count, and the next version is 2.100" in out
    code, out, _ = shell.run("epoch", "mine", "--first-number", "1", "--epoch", "9")
    assert (code, "no earlier version counts" in out) == (0, True)
    trust = shell.trust()
    for signed in runs.load_epochs(shell.home / "mine"):
        record = trust.accept_epoch(signed)
    assert (record.epoch, record.kept_version, record.first_number) == (9, None, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "--first-number"),
        (("--keep", "0.57"), "belong together"),
        (("--keep", "57", "--root", ROOT), "is no version"),
        (("--keep", "0.57", "--root", "ab"), "64 hexadecimal digits"),
        (("--keep", "0.57", "--root", ROOT, "--first-number", "57"), "no epoch can be like that"),
        (("--first-number", "5", "--epoch", "0"), "no epoch can be like that"),
        (("--first-number", str(1 << 63)), "no epoch can be like that"),
    ],
)
def test_an_epoch_that_cannot_be_is_refused_and_nothing_is_written(
    shell: Shell, arguments: tuple[str, ...], text: str
) -> None:
    shell.create()
    shell.fails(2, text, "epoch", "mine", *arguments)
    assert runs.load_epochs(shell.home / "mine") == []


def test_an_epoch_of_several_owners_waits_for_all_of_them(shell: Shell) -> None:
    create_shared(shell)
    code, out, _ = shell.run("epoch", "mine", "--first-number", "5", *owner(shell, "first"))
    files = shell.home / "mine" / "epochs"
    told = f"give the other owners {files}; they run 'pulsenet run countersign mine --epoch' and give it back"
    assert (code, out) == (0, f"epoch 1 has 1 of 2 signatures: {told}\n")
    assert shell.ok("countersign", "mine", "--epoch", *owner(shell, "second")) == {"signatures": 2, "needed": 2}
    assert "epoch 1 has 2 of 2 signatures" in shell.run("countersign", "mine", "--epoch", *owner(shell, "second"))[1]
    shell.trust().accept_epoch(runs.load_epochs(shell.home / "mine")[0])


def test_no_epoch_no_signature(shell: Shell) -> None:
    shell.create()
    shell.fails(78, "opened no epoch", "countersign", "mine", "--epoch")
