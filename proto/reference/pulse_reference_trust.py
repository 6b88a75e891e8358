"""Slow reference of proto/SPEC.md section 6: what a node believes. Imports nothing from pulsenet.

Records come as decoded signed records (dicts); ``Trust`` keeps plain dicts. Each ``accept_*`` returns the
record or raises ``Refused`` with the code.
"""

import pulse_reference as ref
from pulse_reference import Refused, digest, open_record, require


class Trust:
    def __init__(self, run_id, revision_min=0):
        self.run_id = run_id
        self.revision_min = revision_min
        self.descriptor = None  # (record, digest)
        self.epochs = []  # (record, digest, signers)
        self.head = None  # (record, signer)
        self.catalogue = None  # (record, signer)
        self.roots = {}  # version -> root, in the epoch in force
        self.forked = False
        self.table = None

    def known(self):
        require(self.descriptor is not None, "revision-unknown")
        record = self.descriptor[0]
        require(record["revision"] >= self.revision_min, "revision-unknown")
        return record

    def epoch(self):
        return self.epochs[-1][0]["epoch"] if self.epochs else 0

    def in_force(self):
        if self.head is None or self.head[0]["version"][0] != self.epoch():
            return False
        return self.head[1] in self.descriptor[0]["authorities"]

    def accept_descriptor(self, signed):
        name = digest(signed["payload"])
        if self.descriptor is not None and self.descriptor[1] == name:
            return self.descriptor[0]
        record = open_record("descriptor", signed, self.run_id)
        newest = self.descriptor and self.descriptor[0]
        require(newest is None or record["revision"] > newest["revision"], "rollback")
        require(record["revision"] == (0 if newest is None else newest["revision"] + 1), "revision-gap")
        before = newest or record
        require(set(signed["signers"]) <= set(before["owners"]), "untrusted")
        require(len(signed["signers"]) >= before["owner_threshold"], "untrusted")
        if newest is not None:
            require(record["previous"] == self.descriptor[1] and record["nonce"] == newest["nonce"], "mismatch")
        self.descriptor = (record, name)
        if self.catalogue and not (self.in_force() and self.catalogue[1] in record["authorities"]):
            self.catalogue = None
        return record

    def open_epoch(self, signed):
        known = self.known()
        record = open_record("epoch", signed, self.run_id, known["owners"] + known["authorities"])
        require(record["revision"] <= known["revision"], "revision-unknown")
        owners = len(set(known["owners"]) & set(signed["signers"]))
        authorities = len(set(known["authorities"]) & set(signed["signers"]))
        is_owners = owners >= known["owner_threshold"]
        require(is_owners or 2 * authorities > len(known["authorities"]), "untrusted")
        require(is_owners or record["epoch"] < 1 << 32, "untrusted")
        return record

    def binding(self, record, signed):
        """What still binds a node that takes an epoch record: all, unless the owners signed it after a revocation."""
        known = self.descriptor[0]
        if (
            record["epoch"] <= self.epoch()
            or len(set(known["owners"]) & set(signed["signers"])) < known["owner_threshold"]
        ):
            return self.head, self.epochs

        def binds(said, signers):
            return said["revision"] >= record["revision"] or set(signers) <= set(known["owners"] + known["authorities"])

        head = self.head if self.head is not None and binds(self.head[0], [self.head[1]]) else None
        return head, [item for item in self.epochs if binds(item[0], item[2])]

    def accept_epoch(self, signed):
        record = self.open_epoch(signed)
        name = digest(signed["payload"])
        is_news = not self.epochs or name != self.epochs[-1][1]
        require(record["epoch"] >= self.epoch(), "rollback")
        head, epochs = self.binding(record, signed)
        if head is not None and head[0]["version"][0] == record["epoch"]:
            if is_news:
                self.forked = True
                raise Refused("fork")
            return record
        if head is not None:
            require(record["first_number"] > head[0]["version"][1], "rollback")
        if is_news:
            self.head = head
            self.epochs = [item for item in epochs if item[0]["epoch"] < record["epoch"]]
            self.epochs.append((record, name, signed["signers"]))
            self.forked, self.table, self.catalogue, self.roots = False, None, None, {}
        return record

    def accept_last_head(self, signed, now_ms):
        return self.accept_head(signed, now_ms, may_be_over=self.stale(now_ms))

    def stale(self, now_ms):
        return not self.in_force() or now_ms >= self.head[0]["valid_until_ms"]

    def accept_head(self, signed, now_ms, may_be_over=False):
        known = self.known()
        record = open_record("head", signed, self.run_id, known["authorities"])
        require(record["revision"] <= known["revision"], "revision-unknown")
        epoch, number = record["version"]
        require(epoch >= self.epoch(), "rollback")
        require(epoch == self.epoch(), "epoch")
        require(record["epoch_digest"] == (self.epochs[-1][1] if self.epochs else None), "epoch")
        require(not self.epochs or number >= self.epochs[-1][0]["first_number"], "epoch")
        self.refuse_fork("head", record)
        if self.head is not None:
            newest, signer = self.head
            require(record["version"] >= newest["version"], "rollback")
            if self.in_force():
                if record["version"] == newest["version"] and record["issued_at_ms"] <= newest["issued_at_ms"]:
                    return newest
                require(record["term"] >= newest["term"], "term")
                require(record["term"] > newest["term"] or signed["signers"][0] == signer, "term")
        require(may_be_over or now_ms < record["valid_until_ms"], "expired")
        require(record["issued_at_ms"] <= now_ms + ref.VALIDITY_MS, "future")
        self.head = (record, signed["signers"][0])
        self.remember("head", record)
        return record

    def accept_catalogue(self, signed):
        known = self.known()
        require(self.in_force() and digest(signed["payload"]) == self.head[0]["catalogue_digest"], "mismatch")
        record = open_record("catalogue", signed, self.run_id, known["authorities"])
        self.refuse_fork("catalogue", record)
        head = self.head[0]
        require(record["epoch"] == head["version"][0], "mismatch")
        for entry in record["entries"]:
            require(entry["version"] <= head["version"] and self.is_kept(entry["version"]), "mismatch")
        named = [entry for entry in record["entries"] if entry["manifest_digest"] == head["manifest_digest"]]
        facts = [(entry["version"], entry["root"]) for entry in named]
        require(facts == [(head["version"], head["root"])], "mismatch")
        self.catalogue = (record, signed["signers"][0])
        self.remember("catalogue", record)
        return record

    def accept_manifest(self, signed):
        known = self.known()
        name = digest(signed["payload"])
        entries = {entry["manifest_digest"]: entry for entry in (self.catalogue or ({"entries": []},))[0]["entries"]}
        is_head = self.in_force() and self.head[0]["manifest_digest"] == name
        record = open_record(
            "manifest", signed, self.run_id, None if is_head or name in entries else known["authorities"]
        )
        require(record["revision"] <= known["revision"], "revision-unknown")
        version = record["version"]
        require(version[0] <= self.epoch(), "epoch")
        require(self.is_kept(version), "rollback")
        self.refuse_fork("manifest", record)
        if is_head:
            require(all(record[name] == self.head[0][name] for name in ("version", "root")), "mismatch")
        if name in entries:
            facts = {**{field: record[field] for field in ref.ENTRY if field in record}, "manifest_digest": name}
            require(facts == entries[name], "mismatch")
        if version[0] == self.epoch():
            self.check_in_epoch(record, known)
            self.table = record["table_digest"]
        if signed["signers"][0] in known["authorities"]:
            self.remember("manifest", record)
        return record

    def check_in_epoch(self, record, known):
        table = known["table_digest"] if self.table is None and self.epoch() == 0 else self.table
        require(table is None or record["table_digest"] == table, "table")
        base = record["base_version"]
        if not self.epochs:
            require(base != [0, 0] or record["base_root"] == known["base_root"], "mismatch")
            return
        start = self.epochs[-1][0]
        require(record["version"][1] >= start["first_number"], "epoch")
        if base is None:
            return
        if base[0] == start["epoch"]:
            require(base[1] >= start["first_number"], "epoch")
        else:
            facts = (base, record["base_root"], record["version"][1])
            require(facts == (start["kept_version"], start["kept_root"], start["first_number"]), "mismatch")

    def accept_vote(self, signed):
        authorities = self.known()["authorities"]
        record = open_record("vote", signed, self.run_id, authorities)
        require(record["revision"] <= self.known()["revision"], "revision-unknown")
        require(record["candidate"] in authorities, "untrusted")
        return record

    def accept_contribution(self, signed):
        known = self.known()
        require(signed["signers"][0] in known["trainers"] or known["open_trainers_max"] > 0, "untrusted")
        record = open_record("contribution", signed, self.run_id)
        require(record["revision"] <= known["revision"], "revision-unknown")
        require(record["peer_id"] == signed["signers"][0], "untrusted")
        return record

    def accept_receipt(self, signed):
        record = open_record("receipt", signed, self.run_id, self.known()["authorities"])
        require(record["revision"] <= self.known()["revision"], "revision-unknown")
        require(record["coordinator"] in signed["signers"], "untrusted")
        return record

    def accept_state_anchor(self, signed):
        record = open_record("stateanchor", signed, self.run_id, self.known()["authorities"])
        require(record["revision"] <= self.known()["revision"], "revision-unknown")
        return record

    def accept_aggregate(self, signed):
        record = open_record("aggregate", signed, self.run_id, self.known()["authorities"])
        require(record["revision"] <= self.known()["revision"], "revision-unknown")
        return record

    def accept_roster(self, vote, signed):
        """Take a roster; ``vote`` proves the term of a run with one authority."""
        mandate = self.accept_vote(vote)
        signers = [key for key in self.known()["authorities"] if key == mandate["candidate"]]
        record = open_record("roster", signed, self.run_id, signers)
        require(record["revision"] <= self.known()["revision"], "revision-unknown")
        require(record["term"] == mandate["term"], "term")
        unlisted = [key for key in record["members"] if key not in self.known()["trainers"]]
        require(len(unlisted) <= self.known()["open_trainers_max"], "untrusted")
        return record

    def open_of_member(self, kind, signed_roster, signed):
        """Open what a member of a roster that was taken before says of one of its rounds."""
        roster = ref.take(ref.RECORDS["roster"], ref.decode(signed_roster["payload"]))
        record = open_record(kind, signed, self.run_id, roster["members"])
        require(record["revision"] <= self.known()["revision"], "revision-unknown")
        signer = signed["signers"][0]
        is_let_in = signer in self.known()["trainers"] or self.known()["open_trainers_max"] > 0
        require(record["peer_id"] == signer and is_let_in, "untrusted")
        require(record["roster"] == ref.digest(signed_roster["payload"]), "mismatch")
        first = roster["first_round"]
        require(first <= record["round_index"] < first + roster["round_count"], "mismatch")
        return roster, record

    def accept_probe(self, signed_roster, signed):
        """Take an answer to the probe."""
        roster, record = self.open_of_member("probe", signed_roster, signed)
        count = len(roster["subset"])
        require(count == 0 or len(record["scores"]) in (0, 4 * count), "mismatch")
        return record

    def accept_share(self, signed_roster, signed):
        """Take a share."""
        roster, record = self.open_of_member("share", signed_roster, signed)
        count = len(roster["members"])
        require(record["slice_count"] in (1, count * max(1, min(4, 32 // count))), "mismatch")
        if record["kind"] == "mean":
            bits = "".join(f"{byte:08b}" for byte in record["contributors"])
            size_fits = len(record["contributors"]) == (count + 7) // 8
            require(size_fits and "1" in bits[:count] and "1" not in bits[count:], "mismatch")
        return record

    def accept_fork_proof(self, first, second):
        version = contradiction(self.open_claimant(first), self.open_claimant(second))
        require(version is not None, "mismatch")
        require(version[0] >= self.epoch(), "rollback")
        require(version[0] == self.epoch(), "epoch")
        self.forked = True

    def open_claimant(self, signed):
        if signed["type"] == "epoch":
            return "epoch", self.open_epoch(signed)
        kind = signed["type"] if signed["type"] in ("head", "catalogue") else "manifest"
        return kind, open_record(kind, signed, self.run_id, self.known()["authorities"])

    def is_kept(self, version):
        later = [record for record, _, _ in self.epochs if record["epoch"] > version[0]]
        return all(record["kept_version"] is not None and version <= record["kept_version"] for record in later)

    def refuse_fork(self, kind, record):
        for version, root in claims(kind, record).items():
            self.forked |= version[0] == self.epoch() and self.roots.get(version, root) != root
        require(not self.forked, "fork")

    def remember(self, kind, record):
        for version, root in claims(kind, record).items():
            if version[0] == self.epoch():
                self.roots.setdefault(version, root)
        for version in sorted(self.roots)[: -ref.EVIDENCE_MAX]:
            del self.roots[version]


def claims(kind, record):
    found = {}
    if kind == "catalogue":
        found = {tuple(entry["version"]): entry["root"] for entry in record["entries"]}
    if kind in ("head", "manifest"):
        found[tuple(record["version"])] = record["root"]
    if kind == "manifest" and record["base_version"] is not None:
        found[tuple(record["base_version"])] = record["base_root"]
    if kind == "epoch" and record["kept_version"] is not None:
        found[tuple(record["kept_version"])] = record["kept_root"]
    return found


def contradiction(first, second):
    if first[0] == second[0] == "epoch":
        one, two = first[1], second[1]
        differ = one["epoch"] == two["epoch"] and one != two
        return (one["epoch"], max(one["first_number"], two["first_number"])) if differ else None
    left, right = claims(*first), claims(*second)
    return max((version for version in left if right.get(version, left[version]) != left[version]), default=None)
