"""An authority's key leaked: the owner's commands bring the run back, and nobody wipes data (docs/security.md)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pulsenet.chain.records import Head
from pulsenet.chain.signing import encode_signed, record_digest, seal
from pulsenet.errors import TrustError
from pulsenet.ids import PeerId, RunId, Version, compute_digest
from pulsenet.node.news import TRUST_KEY
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.messages import GetDescriptors, GetEpochs, RecordsReply
from pulsenet.wire.schema import INTEGER_MAX
from pulsenetd import cli, runs
from pulsenetd.identity import Identity, load_or_create, to_libp2p_text, verify
from pulsenetd.membership import Membership
from pulsenetd.storage.store import Store
from pulsenetd.trust_state import open_trust

NOW_MS = 1_800_000_000_000


class Machine:
    """The run's directory and one node's store on a machine."""

    def __init__(self, run_path: Path, data_path: Path, token: Any) -> None:
        self.run_path, self.data_path, self.token = run_path, data_path, token
        self.start()

    def start(self) -> None:
        self.store = Store.open(self.data_path)
        self.trust = open_trust(self.store, self.token, verify)
        self.membership = Membership(self.run_path, self.store, self.trust)
        self.membership.refresh()

    def restart(self) -> None:
        self.store.save_state(TRUST_KEY, self.trust.save())
        self.store.close()
        self.start()

    def ask(self, other: Machine) -> bool:
        async def answer(peer_id: PeerId, request: GetDescriptors | GetEpochs) -> RecordsReply:
            if isinstance(request, GetDescriptors):
                return RecordsReply(tuple(other.membership.encoded()[request.revision_min :]))
            return RecordsReply(tuple(encode_signed(signed) for signed in other.trust.epoch_records))

        return asyncio.run(self.membership.ask(PeerId(bytes(32)), answer))


def make_head(machine: Machine, key: Identity, version: Version) -> Any:
    descriptor = machine.trust.descriptor
    assert descriptor is not None
    head = Head(
        run_id=machine.token.run_id,
        revision=descriptor.revision,
        term=0,
        version=version,
        root=compute_digest(b"root %d" % version.number),
        manifest_digest=compute_digest(b"manifest"),
        catalogue_digest=compute_digest(b"catalogue"),
        epoch_digest=machine.trust.epoch_digest,
        issued_at_ms=NOW_MS,
        valid_until_ms=NOW_MS + 300_000,
    )
    return seal(head, key.sign, key.peer_id)


def test_a_leaked_key_is_revoked_and_the_run_goes_on_where_the_owner_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "owner"))
    leaked, successor = (load_or_create(tmp_path / f"{name}.key") for name in ("leaked", "successor"))

    def run(*arguments: str) -> Any:
        assert cli.main(["run", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    created = run("create", "mine", "--authority", to_libp2p_text(leaked.peer_id))
    run_path = Path(created["dir"])
    token = runs.read_run_file(run_path / "run.json").token
    assert token.run_id == RunId(record_digest(runs.load_descriptors(run_path)[0]))
    home = Machine(run_path, tmp_path / "home", token)
    away = Machine(tmp_path / "away-run", tmp_path / "away", token)
    assert away.ask(home)
    data = b"weights that took hours to fetch"
    chunk_list = ChunkList(((len(data), compute_digest(data)),))
    away.store.put_chunk_list(chunk_list.blob_id, chunk_list.encode())
    away.store.put_chunks({compute_digest(data): data})

    # The thief runs ahead: nothing can follow the greatest number there is.
    for machine in (home, away):
        machine.trust.accept_head(make_head(machine, leaked, Version(0, 57)), NOW_MS)
        machine.trust.accept_head(make_head(machine, leaked, Version(0, INTEGER_MAX)), NOW_MS)
        machine.restart()

    run("promote", "mine", to_libp2p_text(successor.peer_id))
    run("revoke", "mine", to_libp2p_text(leaked.peer_id))
    root = compute_digest(b"root 57").hex()
    assert run("epoch", "mine", "--keep", "0.57", "--root", root)["complete"]
    home.membership.refresh()
    assert away.ask(home)

    for machine in (home, away):
        assert machine.trust.epoch == 1
        assert machine.trust.head is None
        head = make_head(machine, successor, Version(1, 58))
        assert machine.trust.accept_head(head, NOW_MS).version == Version(1, 58)
        machine.restart()
        assert machine.trust.head is not None
        assert machine.trust.head.version == Version(1, 58)
        with pytest.raises(TrustError, match="signed by"):
            machine.trust.accept_head(make_head(machine, leaked, Version(1, INTEGER_MAX)), NOW_MS)
    assert b"".join(away.store.read_blob(chunk_list.blob_id)) == data
    home.store.close()
    away.store.close()
