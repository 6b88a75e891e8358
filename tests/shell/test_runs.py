"""Run directories, run files and signed revisions."""

from __future__ import annotations

import errno
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from pulsenet.chain.records import Descriptor, EpochRecord
from pulsenet.chain.signing import add_signature, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.errors import ConfigError, StorageError
from pulsenet.ids import PeerId, RunId
from pulsenetd import identity, runs
from pulsenetd.errors import DirectoryLockedError
from pulsenetd.storage.disk import DirectoryLock, Disk


def make_run(path: Path, owner: identity.Identity) -> runs.RunFile:
    descriptor = runs.genesis(
        "mine",
        nonce=bytes(16),
        owner=owner.peer_id,
        authorities=[owner.peer_id],
        trainers=[owner.peer_id],
        inferencers=[],
        open_inferencers_max=2,
        private=True,
        anchor_interval=10,
        publish_interval_min_ms=0,
    )
    return runs.create_run(
        path,
        descriptor,
        sign=owner.sign,
        owner=owner.peer_id,
        bootstraps=(),
        secret=b"s" * 16,
        expires_at_ms=None,
    )


@pytest.fixture
def owner(tmp_path: Path) -> identity.Identity:
    return identity.load_or_create(tmp_path / "owner.key")


def test_a_created_run_is_read_back_and_its_files_are_private(tmp_path: Path, owner: identity.Identity) -> None:
    file = make_run(tmp_path / "mine", owner)
    path = tmp_path / "mine" / "run.json"
    assert runs.read_run_file(path) == file
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list((tmp_path / "mine").rglob("*.partial"))
    with pytest.raises(ConfigError, match="exists already"):
        make_run(tmp_path / "mine", owner)


def test_a_run_whose_second_file_was_refused_is_made_at_the_next_try(
    tmp_path: Path, owner: identity.Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("no space left", "enospc")

    with monkeypatch.context() as broken:
        broken.setattr(runs, "write_run_file", refuse)
        with pytest.raises(StorageError, match="no space left"):
            make_run(tmp_path / "mine", owner)
    assert runs.load_descriptors(tmp_path / "mine") == []
    make_run(tmp_path / "mine", owner)


def test_a_run_that_was_killed_between_its_files_is_said_with_what_to_remove(
    tmp_path: Path, owner: identity.Identity
) -> None:
    """It may as well be a run that lives, whose file was deleted because it was damaged: nothing is overwritten."""
    run = tmp_path / "mine"
    make_run(run, owner)
    (run / "run.json").unlink()
    with pytest.raises(ConfigError, match=f"join it by its token, or .* remove {run / 'descriptors'} and create it"):
        make_run(run, owner)


def test_revisions_form_a_chain_the_trust_rules_accept(tmp_path: Path, owner: identity.Identity) -> None:
    file = make_run(tmp_path / "mine", owner)
    newcomer = PeerId(b"n" * 32)

    def admit(current: Descriptor) -> Descriptor:
        return replace(current, inferencers=(newcomer,))

    changed, signatures = runs.revise(tmp_path / "mine", admit, sign=owner.sign, owner=owner.peer_id)
    assert (changed.revision, signatures.is_complete) == (1, True)
    trust = Trust(file.token.run_id, identity.verify)
    for record in runs.load_descriptors(tmp_path / "mine"):
        trust.accept_descriptor(record)
    assert trust.descriptor == changed


def test_a_second_owner_completes_a_revision(tmp_path: Path, owner: identity.Identity) -> None:
    second = identity.load_or_create(tmp_path / "second.key")
    make_run(tmp_path / "mine", owner)

    def share(current: Descriptor) -> Descriptor:
        return replace(current, owners=tuple(sorted((owner.peer_id, second.peer_id))), owner_threshold=2)

    runs.revise(tmp_path / "mine", share, sign=owner.sign, owner=owner.peer_id)
    _, signatures = runs.revise(tmp_path / "mine", lambda current: current, sign=owner.sign, owner=owner.peer_id)
    assert signatures == runs.Signatures(2, 1, 2)
    signatures = runs.countersign(tmp_path / "mine", sign=second.sign, owner=second.peer_id)
    assert signatures == runs.Signatures(2, 2, 2)


def test_nobody_else_changes_a_run_while_it_is_changed(tmp_path: Path, owner: identity.Identity) -> None:
    """Two commands at a time would sign two revisions of one number: one is lost, and what follows it is refused."""
    run = tmp_path / "mine"
    make_run(run, owner)
    held: list[bool] = []

    def look() -> None:
        with pytest.raises(DirectoryLockedError):
            DirectoryLock.acquire(run)
        held.append(True)

    def change(current: Descriptor) -> Descriptor:
        look()
        return replace(current, anchor_interval=current.anchor_interval + 1)

    def open_epoch(current: Descriptor, run_id: RunId) -> EpochRecord:
        look()
        return EpochRecord(run_id, current.revision, 1, None, None, 5, "owners")

    def sign(message: bytes) -> bytes:
        look()
        return owner.sign(message)

    runs.revise(run, change, sign=sign, owner=owner.peer_id)
    runs.open_epoch(run, open_epoch, sign=sign, owner=owner.peer_id)
    runs.countersign(run, sign=sign, owner=owner.peer_id)
    runs.countersign_epoch(run, sign=sign, owner=owner.peer_id)
    assert len(held) == 6
    DirectoryLock.acquire(run).release()


def test_strangers_and_absent_runs_are_refused(tmp_path: Path, owner: identity.Identity) -> None:
    with pytest.raises(ConfigError, match="no run in"):
        runs.revise(tmp_path / "none", lambda current: current, sign=owner.sign, owner=owner.peer_id)
    with pytest.raises(ConfigError, match="no run in"):
        runs.countersign(tmp_path / "none", sign=owner.sign, owner=owner.peer_id)
    make_run(tmp_path / "mine", owner)
    stranger = identity.load_or_create(tmp_path / "stranger.key")
    with pytest.raises(ConfigError, match="does not own"):
        runs.revise(tmp_path / "mine", lambda current: current, sign=stranger.sign, owner=stranger.peer_id)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"name": "x", "token": "nonsense", "bootstraps": []}'])
def test_a_file_that_is_no_run_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json"):
        runs.read_run_file(path)


def test_damaged_descriptors_are_named(tmp_path: Path, owner: identity.Identity) -> None:
    make_run(tmp_path / "mine", owner)
    path = tmp_path / "mine" / "descriptors" / "000000.record"
    path.write_bytes(b"damage")
    with pytest.raises(StorageError, match="damaged"):
        runs.load_descriptors(tmp_path / "mine")
    path.write_bytes(bytes(1 << 20))
    with pytest.raises(StorageError, match="too large"):
        runs.load_descriptors(tmp_path / "mine")


def test_nodes_of_one_role_are_numbered() -> None:
    run = Path("/data/pulsenet/mine")
    assert runs.node_path(run, "inferencer", 1) == Path("/data/pulsenet/mine/inferencer")
    assert runs.node_path(run, "inferencer", 2) == Path("/data/pulsenet/mine/inferencer-2")


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StorageError, match=r"cannot create directory .*file"):
        runs.write_private(tmp_path / "file" / "run.json", b"")


def propose_owner(run: Path, owner: identity.Identity, second: identity.Identity) -> None:
    """Revision 1 makes two owners, who both have to sign revision 2; it lacks the second's signature."""
    owners = tuple(sorted((owner.peer_id, second.peer_id)))

    def share(current: Descriptor) -> Descriptor:
        return replace(current, owners=owners, owner_threshold=2)

    for change in (share, lambda current: replace(current, open_inferencers_max=9)):
        runs.revise(run, change, sign=owner.sign, owner=owner.peer_id)


def test_a_copy_of_a_revision_that_counts_is_not_taken_back_in_its_stead(
    tmp_path: Path, owner: identity.Identity
) -> None:
    run, second = tmp_path / "mine", identity.load_or_create(tmp_path / "second.key")
    make_run(run, owner)
    propose_owner(run, owner, second)
    proposed = run / "descriptors" / "000002.record"
    data = proposed.read_bytes()
    runs.countersign(run, sign=second.sign, owner=second.peer_id)
    (run / "descriptors" / "1-of-second.record").write_bytes(data)
    with pytest.raises(ConfigError, match="does not hold one file for each revision"):
        runs.withdraw(run)
    assert proposed.exists()
    (run / "descriptors" / "1-of-second.record").replace(run / "descriptors" / "2.record")
    proposed.unlink()
    with pytest.raises(ConfigError, match="does not hold one file for each revision"):
        runs.withdraw(run)


def test_signatures_that_no_owner_made_do_not_keep_a_revision_from_being_taken_back(
    tmp_path: Path, owner: identity.Identity
) -> None:
    """One of the owners gives a copy back that looks whole and that no node believes."""
    run, second = tmp_path / "mine", identity.load_or_create(tmp_path / "second.key")
    stranger = identity.load_or_create(tmp_path / "stranger.key")
    make_run(run, owner)
    propose_owner(run, owner, second)
    proposed = runs.load_descriptors(run)[-1]
    for sign, key in ((stranger.sign, second.peer_id), (stranger.sign, stranger.peer_id)):
        runs.save_descriptor(run, add_signature(proposed, sign, key))
        assert not runs.count_signatures(runs.load_descriptors(run)).is_complete
        with pytest.raises(ConfigError, match="lacks signatures"):
            runs.revise(run, lambda current: current, sign=owner.sign, owner=owner.peer_id)
        assert runs.withdraw(run) == 2
        runs.save_descriptor(run, add_signature(proposed, sign, key))
        assert runs.countersign(run, sign=second.sign, owner=second.peer_id).is_complete
        trust = Trust(RunId(record_digest(runs.load_descriptors(run)[0])), identity.verify)
        for signed in runs.load_descriptors(run):
            trust.accept_descriptor(signed)
        runs.save_descriptor(run, proposed)


def test_a_disk_that_refuses_to_delete_a_revision_is_named(
    tmp_path: Path, owner: identity.Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, second = tmp_path / "mine", identity.load_or_create(tmp_path / "second.key")
    make_run(run, owner)
    propose_owner(run, owner, second)

    def refuse(self: Disk, path: Path) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(Disk, "remove", refuse)
    with pytest.raises(StorageError, match=r"cannot delete .*000002.record"):
        runs.withdraw(run)
