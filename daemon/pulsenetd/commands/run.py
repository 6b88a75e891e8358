"""``pulsenet run``: create a run, show it, and change whom it trusts."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pulsenet import limits
from pulsenet.chain.records import ALGORITHM_NONE, Descriptor, EpochRecord, SignedRecord
from pulsenet.chain.rules import check_record
from pulsenet.chain.token import encode_token
from pulsenet.errors import ConfigError, LocalProtocolError, RemoteProtocolError, UsageError
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.local.directories import data_home
from pulsenet.wire.schema import decode_value, encode_value
from pulsenetd import config, runs
from pulsenetd.commands import run_examples, run_rounds
from pulsenetd.commands.run_keys import HEX_KEY, parse_key, parse_new_key
from pulsenetd.logs import printable
from pulsenetd.storage.disk import Disk, make_directory
from pulsenetd.words import say_count, say_moment

ANCHOR_INTERVAL_MAX: Final = 1_000_000
PUBLISH_INTERVAL_SECONDS_MAX: Final = 86_400
EXPIRES_HOURS_MAX: Final = 10 * 365 * 24
PASSED_ON: Final = "running nodes of this machine pass it on within a minute"
NAME_HELP: Final = "name of the run on this machine"


def add_parser(commands: Any) -> None:
    """Add ``run create|show|token|admit|revoke|promote|own|disown|epoch|countersign|withdraw`` to the command line."""
    parser = commands.add_parser(
        "run", help="create a run or change whom it trusts", examples=(*run_examples.CREATE[:1], *run_examples.SHOW)
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser(
        "create", help="name a run, list its keys, print its join token", examples=run_examples.CREATE
    )
    create.add_argument("name", metavar="NAME", help=NAME_HELP)
    create.add_argument("--authority", action="append", default=[], metavar="KEY", help="key that may publish")
    create.add_argument(
        "--trainer", action="append", default=[], metavar="KEY", help="key that may contribute (default: authorities)"
    )
    create.add_argument("--inferencer", action="append", default=[], metavar="KEY", help="key whose rollouts count")
    create.add_argument("--open-inferencers", type=int, default=0, metavar="N", help="unlisted inferencers admitted")
    create.add_argument("--private", action="store_true", help="only holders of the token find the run")
    create.add_argument(
        "--anchor-interval",
        type=int,
        default=limits.ANCHOR_INTERVAL_DEFAULT,
        metavar="N",
        help=f"versions between anchors ({limits.ANCHOR_INTERVAL_DEFAULT})",
    )
    create.add_argument(
        "--publish-interval", type=float, default=0.0, metavar="SECONDS", help="least time between versions"
    )
    run_rounds.add_options(create)
    _add_token_options(create)
    _common(create, _create)
    show = actions.add_parser("show", help="print a run's descriptor and token", examples=run_examples.SHOW)
    show.add_argument("name", metavar="NAME", nargs="?", default=runs.LOCAL_RUN, help=f"{NAME_HELP} (default: local)")
    _common(show, _show, signs=False)
    token = actions.add_parser(
        "token", help="give the join token another end or other addresses, and print it", examples=run_examples.TOKEN
    )
    token.add_argument("name", metavar="NAME", help=NAME_HELP)
    _add_token_options(token)
    _common(token, _renew, signs=False)
    for action, (text, _) in _CHANGES.items():
        change = actions.add_parser(action, help=text, examples=run_examples.CHANGES[action])
        change.add_argument("name", metavar="NAME", help=NAME_HELP)
        change.add_argument("key", metavar="KEY", help="peer id, or public key in hexadecimal")
        if action == "admit":
            change.add_argument("--role", choices=("trainer", "inferencer"), required=True, help="what its key may do")
        if action in ("own", "disown"):
            change.add_argument("--threshold", type=int, metavar="K", help="owners who have to sign from then on")
        _common(change, _change)
    epoch = actions.add_parser(
        "epoch", help="say where the run goes on, for instance after a key leaked", examples=run_examples.EPOCH
    )
    epoch.add_argument("name", metavar="NAME", help=NAME_HELP)
    epoch.add_argument("--keep", metavar="E.N", help="last version that still counts (default: none does)")
    epoch.add_argument("--root", metavar="HEX", help="root of that version")
    epoch.add_argument(
        "--epoch", type=int, metavar="N", help="its number (default: above those the owners opened here)"
    )
    epoch.add_argument("--first-number", type=int, metavar="N", help="of its first version (default: after --keep)")
    _common(epoch, _open_epoch)
    countersign = actions.add_parser(
        "countersign", help="add an owner's signature to the newest revision", examples=run_examples.COUNTERSIGN
    )
    countersign.add_argument("name", metavar="NAME", help=NAME_HELP)
    countersign.add_argument("--epoch", action="store_true", help="to the newest epoch that the owners opened instead")
    _common(countersign, _countersign)
    withdraw = actions.add_parser(
        "withdraw", help="take back a revision that other owners do not sign", examples=run_examples.WITHDRAW
    )
    withdraw.add_argument("name", metavar="NAME", help=NAME_HELP)
    _common(withdraw, _withdraw, signs=False)


def _add_token_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bootstrap", action="append", default=[], metavar="ADDR", help="address put into the token")
    parser.add_argument("--expires", type=float, default=0.0, metavar="HOURS", help="life of the token; 0 for ever")


def _common(
    parser: argparse.ArgumentParser, function: Callable[[argparse.Namespace], int], *, signs: bool = True
) -> None:
    if signs:
        where = "owner.key in the run's directory"
        parser.add_argument("--owner-key", metavar="FILE", help=f"owner's key (default: {where})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run_command=function)


def _run_path(name: str) -> Path:
    config.resolve({"run": name}, {}, None)  # refuses names that are not run names
    return data_home(os.environ) / name


def _owner(arguments: argparse.Namespace, run: Path) -> Any:
    from pulsenetd import identity

    path = Path(arguments.owner_key) if arguments.owner_key else run / "owner.key"
    return identity.load_or_create(path) if arguments.action == "create" else _load_owner(path)


def _load_owner(path: Path) -> Any:
    from pulsenetd import identity

    try:
        return identity.load(path)
    except FileNotFoundError:
        raise ConfigError(f"no owner key at {path}; give --owner-key FILE") from None


def _check_range(arguments: argparse.Namespace, name: str, least: float, most: float) -> None:
    value = getattr(arguments, name)
    if not least <= value <= most:  # NaN is in no range
        raise UsageError(f"{config.flag_name(name)}: {value} is not from {least} to {most}")


def _check_expires(arguments: argparse.Namespace) -> None:
    _check_range(arguments, "expires", 0, EXPIRES_HOURS_MAX)


def _check_create(arguments: argparse.Namespace) -> None:
    """Refuse, before anything is written, what no run can have."""
    for name, least, most in (
        ("anchor_interval", 1, ANCHOR_INTERVAL_MAX),
        ("open_inferencers", 0, limits.KEYS_PER_ROLE_MAX),
        ("open_trainers", 0, limits.ROUND_MEMBERS_MAX),
        ("publish_interval", 0, PUBLISH_INTERVAL_SECONDS_MAX),
    ):
        _check_range(arguments, name, least, most)
    _check_expires(arguments)
    for role in ("authority", "trainer", "inferencer"):
        most = limits.AUTHORITIES_MAX if role == "authority" else limits.KEYS_PER_ROLE_MAX
        if len(getattr(arguments, role)) > most:
            raise UsageError(f"--{role}: {len(getattr(arguments, role))} keys, at most {most} can be listed")
    if not arguments.authority:
        raise UsageError("--authority: name at least one key that may publish (make it with 'pulsenet keygen FILE')")
    config.resolve({"bootstrap": arguments.bootstrap}, {}, None)  # refuses what nobody could dial


def _create(arguments: argparse.Namespace) -> int:
    path = _run_path(arguments.name)
    _check_create(arguments)
    authorities = [parse_new_key(key) for key in arguments.authority]
    trainers = [parse_new_key(key) for key in arguments.trainer] or authorities
    inferencers = [parse_new_key(key) for key in arguments.inferencer]
    algorithm, constants = run_rounds.choose_algorithm(arguments)
    runs.refuse_existing(path, arguments.name)
    make_directory(Disk(), path)
    owner = _owner(arguments, path)
    descriptor = runs.genesis(
        arguments.name,
        nonce=secrets.token_bytes(16),
        owner=owner.peer_id,
        authorities=authorities,
        trainers=trainers,
        inferencers=inferencers,
        open_inferencers_max=arguments.open_inferencers,
        private=arguments.private,
        anchor_interval=arguments.anchor_interval,
        publish_interval_min_ms=round(arguments.publish_interval * 1_000),
        algorithm=algorithm,
        constants=constants,
        open_trainers_max=arguments.open_trainers,
    )
    secret = secrets.token_bytes(16) if arguments.private else b""
    file = runs.create_run(
        path,
        descriptor,
        sign=owner.sign,
        owner=owner.peer_id,
        bootstraps=tuple(arguments.bootstrap),
        secret=secret,
        expires_at_ms=_find_expiry_ms(arguments),
    )
    token = encode_token(file.token)
    if arguments.json:
        print(json.dumps({"name": arguments.name, "run_id": file.token.run_id.hex(), "token": token, "dir": str(path)}))
    else:
        print(f"run {arguments.name} ({file.token.run_id.hex()[:16]}) written to {path}")
        print(f"keep {path / 'owner.key'} safe: it alone can change whom the run trusts")
        print(f"join token: {token}")
        if not arguments.bootstrap:
            # Without an address nobody finds the run by it.
            teller = f"once a node runs here, 'pulsenet run show {arguments.name}'" if secret else "a node started here"
            print(f"the token holds no address yet: {teller} prints one that others can join by:")
            print(f"    pulsenet join --role trainer --run {arguments.name} --data-dir DIRECTORY_OF_THE_KEY")
    return 0


def _load_revisions(path: Path) -> list[SignedRecord]:
    records = runs.load_descriptors(path)
    if not records:
        raise ConfigError(f"no run in {path}; create it with 'pulsenet run create' or join it first")
    return records


def _show(arguments: argparse.Namespace) -> int:
    from pulsenetd import identity

    path = _run_path(arguments.name)
    records = _load_revisions(path)
    descriptor, signatures = decode_value(Descriptor, records[-1].payload), runs.count_signatures(records)
    file = runs.read_own_file(path)

    def keys(role: tuple[PeerId, ...]) -> list[str]:
        return [identity.to_libp2p_text(key) for key in role]

    table = {
        "name": descriptor.name,
        "run_id": file.token.run_id.hex(),
        "revision": descriptor.revision,
        "complete": signatures.is_complete,
        "owners": keys(descriptor.owners),
        "owner_threshold": descriptor.owner_threshold,
        "authorities": keys(descriptor.authorities),
        "trainers": keys(descriptor.trainers),
        "inferencers": keys(descriptor.inferencers),
        "open_inferencers_max": descriptor.open_inferencers_max,
        "private": descriptor.private,
        **run_rounds.describe_algorithm(descriptor),
        "anchor_interval": descriptor.anchor_interval,
        "bootstraps": list(file.bootstraps),
        "token": _tell_token(file),
        "token_expires_at_ms": file.token.expires_at_ms,
    }
    if arguments.json:
        print(json.dumps(table, indent=2))
        return 0
    if not table.pop("complete"):
        table["revision"] = f"{descriptor.revision}, which lacks signatures of owners: it does not count yet"
    table["token_ends"] = _say_end(table.pop("token_expires_at_ms"), arguments.name)
    for name, value in table.items():
        for position, item in enumerate(value if isinstance(value, list) else [value]):
            print(f"{name if position == 0 else '':<26} {printable(str(item))}")
        if value == []:
            print(f"{name:<26} -")
    return 0


def _tell_token(file: runs.RunFile) -> str:
    """Return the run's token with addresses of nodes that are live, where they are known."""
    return encode_token(replace(file.token, bootstraps=file.bootstraps or file.token.bootstraps))


def _renew(arguments: argparse.Namespace) -> int:
    path = _run_path(arguments.name)
    _check_expires(arguments)
    config.resolve({"bootstrap": arguments.bootstrap}, {}, None)  # refuses what nobody could dial
    _load_revisions(path)  # says what to do where there is no such run
    file = runs.renew_token(path, _find_expiry_ms(arguments), tuple(arguments.bootstrap))
    token, expires_at_ms = _tell_token(file), file.token.expires_at_ms
    print(json.dumps({"token": token}) if arguments.json else token)
    if not arguments.json:  # beside the token, which a script may want alone
        end = "never ends; --expires gives it an end" if expires_at_ms is None else f"ends {say_moment(expires_at_ms)}"
        print(f"the token {end}", file=sys.stderr)
    return 0


def _say_end(expires_at_ms: int | None, name: str) -> str:
    if expires_at_ms is None:
        return "never"
    is_over = expires_at_ms < time.time() * 1_000
    step = f", and nobody joins by it any more: 'pulsenet run token {name}' makes another" if is_over else ""
    return say_moment(expires_at_ms) + step


def _find_expiry_ms(arguments: argparse.Namespace) -> int | None:
    return round((time.time() + arguments.expires * 3_600) * 1_000) if arguments.expires > 0 else None


def _admit(descriptor: Descriptor, key: PeerId, role: str) -> Descriptor:
    if role == "trainer":
        return replace(descriptor, trainers=tuple(sorted({*descriptor.trainers, key})))
    return replace(descriptor, inferencers=tuple(sorted({*descriptor.inferencers, key})))


def _revoke(descriptor: Descriptor, key: PeerId, role: str) -> Descriptor:
    def without(keys: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
        return tuple(item for item in keys if item != key)

    changed = replace(
        descriptor,
        authorities=without(descriptor.authorities),
        trainers=without(descriptor.trainers),
        inferencers=without(descriptor.inferencers),
    )
    if not changed.authorities:
        raise UsageError("this is the last authority; promote another key before revoking it")
    return changed


def _promote(descriptor: Descriptor, key: PeerId, role: str) -> Descriptor:
    return replace(descriptor, authorities=tuple(sorted({*descriptor.authorities, key})))


def _own(descriptor: Descriptor, key: PeerId, role: str) -> Descriptor:
    return replace(descriptor, owners=tuple(sorted({*descriptor.owners, key})))


def _disown(descriptor: Descriptor, key: PeerId, role: str) -> Descriptor:
    return replace(descriptor, owners=tuple(owner for owner in descriptor.owners if owner != key))


_CHANGES: dict[str, tuple[str, Callable[[Descriptor, PeerId, str], Descriptor]]] = {
    "admit": ("list a trainer's or inferencer's key", _admit),
    "revoke": ("remove a key from every role", _revoke),
    "promote": ("let a key publish", _promote),
    "own": ("let a key own the run, beside its owners", _own),
    "disown": ("remove an owner", _disown),
}


def _change(arguments: argparse.Namespace) -> int:
    path = _run_path(arguments.name)
    # One that was listed before it was checked can be removed.
    key = (parse_key if arguments.action in ("revoke", "disown") else parse_new_key)(arguments.key)
    _, change = _CHANGES[arguments.action]
    role = getattr(arguments, "role", "")
    threshold = getattr(arguments, "threshold", None)
    owner = _owner(arguments, path)

    def apply(current: Descriptor) -> Descriptor:
        changed = change(current, key, role)
        if threshold is not None:
            changed = replace(changed, owner_threshold=threshold)
        most = min(len(changed.owners), limits.SIGNATURES_MAX)
        if not 1 <= changed.owner_threshold <= most:
            raise UsageError(
                f"--threshold: {say_count(len(changed.owners), 'owner')} cannot give {changed.owner_threshold} "
                f"signatures; give a number from 1 to {most}"
            )
        if len(changed.authorities) > limits.AUTHORITIES_MAX:
            raise UsageError(
                f"{len(changed.authorities)} authorities, at most {limits.AUTHORITIES_MAX} can be listed; revoke one "
                "that is not needed first"
            )
        if changed == current:
            raise UsageError("the run says so already; nothing was changed")
        try:
            encode_value(changed)
        except LocalProtocolError as error:
            raise UsageError(f"the run cannot be like that: {error}") from error
        return changed

    descriptor, signatures = runs.revise(path, apply, sign=owner.sign, owner=owner.peer_id)
    if arguments.json:
        print(json.dumps({"revision": descriptor.revision, "complete": signatures.is_complete}))
    elif signatures.is_complete:
        print(f"revision {descriptor.revision} signed; {PASSED_ON}")
    else:
        print(_say_signatures(arguments, path, signatures, "revision"))
    if not arguments.json and _may_publish_only(arguments.action, descriptor, key):
        print(f"to contribute to rounds as well: 'pulsenet run admit {arguments.name} {arguments.key} --role trainer'")
    return 0


def _may_publish_only(action: str, descriptor: Descriptor, key: PeerId) -> bool:
    """Say whether a key was given the one half of what a trainer of a run with rounds needs."""
    return action == "promote" and descriptor.algorithm != ALGORITHM_NONE and key not in descriptor.trainers


def _parse_kept(arguments: argparse.Namespace) -> tuple[Version | None, Digest | None]:
    if arguments.keep is None and arguments.root is None:
        return None, None
    if arguments.keep is None or arguments.root is None:
        raise UsageError(
            "--keep and --root belong together: a version and the root that 'pulsenet status' shows for it"
        )
    try:
        kept = config.parse_version(arguments.keep)
    except ValueError as error:
        raise UsageError(f"--keep: {error}") from error
    if not HEX_KEY.fullmatch(arguments.root):
        raise UsageError(f"--root: '{arguments.root}' is not 64 hexadecimal digits")
    return kept, Digest(bytes.fromhex(arguments.root))


def _open_epoch(arguments: argparse.Namespace) -> int:
    path = _run_path(arguments.name)
    kept, root = _parse_kept(arguments)
    first = arguments.first_number
    if first is None:
        if kept is None:
            raise UsageError("--first-number: say with which number the run goes on, or which version it --keep")
        first = kept.number + 1
    owner = _owner(arguments, path)

    def make(current: Descriptor, run_id: RunId) -> EpochRecord:
        # Here, where no other command opens one meanwhile.
        opened = [decode_value(EpochRecord, signed.payload).epoch for signed in runs.load_epochs(path)]
        least = max([0, *opened, 0 if kept is None else kept.epoch]) + 1
        number = least if arguments.epoch is None else arguments.epoch
        record = EpochRecord(run_id, current.revision, number, kept, root, first, "owners")
        try:
            check_record(record)
            encode_value(record)  # numbers beyond 63 bits
        except (RemoteProtocolError, LocalProtocolError) as error:
            raise UsageError(f"no epoch can be like that: {error}") from error
        return record

    record, signatures = runs.open_epoch(path, make, sign=owner.sign, owner=owner.peer_id)
    if arguments.json:
        print(
            json.dumps({"epoch": record.epoch, "first_number": record.first_number, "complete": signatures.is_complete})
        )
    elif signatures.is_complete:
        kept_text = "no earlier version counts" if kept is None else f"what came after version {kept} does not count"
        print(f"epoch {record.epoch} signed: {kept_text}, and the next version is {record.epoch}.{record.first_number}")
        print(PASSED_ON)
    else:
        print(_say_signatures(arguments, path, signatures, "epoch"))
    return 0


def _countersign(arguments: argparse.Namespace) -> int:
    path = _run_path(arguments.name)
    owner = _owner(arguments, path)
    sign_again = runs.countersign_epoch if arguments.epoch else runs.countersign
    signatures = sign_again(path, sign=owner.sign, owner=owner.peer_id)
    if arguments.json:
        print(json.dumps({"signatures": signatures.count, "needed": signatures.needed}))
    else:
        print(_say_signatures(arguments, path, signatures, "epoch" if arguments.epoch else "revision"))
    return 0


def _withdraw(arguments: argparse.Namespace) -> int:
    number = runs.withdraw(_run_path(arguments.name))
    if arguments.json:
        print(json.dumps({"withdrawn": number}))
    else:
        print(f"revision {number} is taken back here")
        print("let the other owners delete their copies of it: one that is signed later and the next one exclude each")
        print("other: nodes would believe either")
    return 0


def _say_signatures(arguments: argparse.Namespace, path: Path, signatures: runs.Signatures, kind: str) -> str:
    """Say what of the owners' signatures is there, and what comes next."""
    there = f"{kind} {signatures.number} has {signatures.count} of {signatures.needed} signatures"
    if signatures.is_complete:
        return f"{there}; {PASSED_ON}"
    command = f"pulsenet run countersign {arguments.name}{' --epoch' if kind == 'epoch' else ''}"
    files = path / ("epochs" if kind == "epoch" else "descriptors")
    return f"{there}: give the other owners {files}; they run '{command}' and give it back"
