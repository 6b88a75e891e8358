import numpy as np
import pytest

from pulsenet.errors import ConfigError
from pulsenet.outer.mixing.settings import Job, MixingKind, MixingSettings, MixingVariant, Vector
from pulsenet.outer.plan import Variant


def test_constants_are_signed_as_bits_and_come_back() -> None:
    settings = MixingSettings(
        variant=MixingVariant.LOCAL_M1_M2,
        learning_rate=0.1,
        mixes_momentum=True,
        mixing_gate=True,
        disagreement_max=0.3,
    )
    constants = settings.to_constants()
    assert [name for name, _ in constants] == sorted(name for name, _ in constants)
    assert dict(constants)["learning_rate"] == int(np.float32(0.1).view(np.uint32))
    assert dict(constants)["variant"] == 4
    assert dict(constants)["mixes_momentum"] == 1
    assert all(type(value) is int for _, value in constants)
    assert MixingSettings.from_constants("gossip", constants) == settings


def test_what_a_descriptor_does_not_name_has_its_default() -> None:
    settings = MixingSettings.from_constants("gossip", (("inner_steps", 16),))
    assert settings == MixingSettings(inner_steps=16)
    assert (settings.variant, settings.roster_rounds) == (MixingVariant.GLOBAL_M1_LOCAL_M2, 8)


def test_variants_have_the_names_that_plans_have() -> None:
    assert {variant.value for variant in MixingVariant} < {variant.value for variant in Variant}


@pytest.mark.parametrize(
    ("variant", "kinds", "has_consensus"),
    [
        ("diloco", ("none", "global"), True),
        ("global_m1", ("global", "none"), True),
        ("global_m1_local_m2", ("global", "pair"), True),
        ("global_m1_local_m2_subset", ("global", "pair"), True),
        ("local_m1_m2", ("pair", "pair"), False),
    ],
)
def test_a_variant_says_who_mixes_what(variant: str, kinds: tuple[str, str], has_consensus: bool) -> None:
    chosen = MixingVariant(variant)
    assert (chosen.kind(Job.MIX1), chosen.kind(Job.MIX2)) == kinds == (chosen.mix1, chosen.mix2)
    assert chosen.has_consensus == has_consensus
    assert chosen.mixes_subset == (variant == "global_m1_local_m2_subset")


def test_momentum_travels_with_pseudo_gradients_or_with_iterates_where_those_stay() -> None:
    both = MixingSettings(mixes_momentum=True)
    assert both.vectors(Job.MIX1) == (Vector.ITERATE,)
    assert both.vectors(Job.MIX2) == (Vector.GRADIENT, Vector.MOMENTUM)
    first = MixingSettings(variant=MixingVariant.GLOBAL_M1, mixes_momentum=True)
    assert first.vectors(Job.MIX1) == (Vector.ITERATE, Vector.MOMENTUM)
    assert first.vectors(Job.MIX2) == ()
    assert MixingSettings(variant=MixingVariant.DILOCO).vectors(Job.MIX1) == ()
    assert MixingSettings().vectors(Job.MIX2) == (Vector.GRADIENT,)


def test_iterates_are_gated_only_against_a_mean_that_all_hold_and_travel_whole_once_a_roster() -> None:
    gated = MixingSettings(mixing_gate=True, mixes_momentum=True, roster_rounds=4)
    assert [gated.gates(Vector.ITERATE, round_index) for round_index in range(5)] == [False, True, True, True, False]
    assert gated.gates(Vector.GRADIENT, 0)
    assert not gated.gates(Vector.MOMENTUM, 1)
    pairs = MixingSettings(variant=MixingVariant.LOCAL_M1_M2, mixing_gate=True)
    assert (pairs.gates(Vector.ITERATE, 1), pairs.gates(Vector.GRADIENT, 1)) == (False, True)
    assert not MixingSettings().gates(Vector.GRADIENT, 1)
    assert MixingKind.PAIR is MixingVariant.LOCAL_M1_M2.mix1


@pytest.mark.parametrize(
    ("algorithm", "constants"),
    [
        ("diloco", ()),
        ("gossip", (("warp_factor", 9),)),
        ("gossip", (("learning_rate", -1),)),
        ("gossip", (("learning_rate", 0x7FC00000),)),
        ("gossip", (("variant", 5),)),
        ("gossip", (("mixing_gate", 2),)),
        ("gossip", (("inner_steps", 0),)),
        ("gossip", (("roster_rounds", 0),)),
        ("gossip", (("mix1_wait_seconds", 0),)),
        ("gossip", (("mix2_wait_seconds", 0),)),
        ("gossip", (("probe_interval", -1),)),
        ("gossip", (("momentum_factor", 0x3F800000),)),
        ("gossip", (("disagreement_max", 0x40000000),)),
        ("gossip", (("subset_ratio", 0),)),
        ("gossip", (("subset_ratio", 0x40000000),)),
        ("gossip", (("norm_max", 0),)),
        ("gossip", (("norm_max", 0x7F000000),)),
        ("gossip", (("mixes_momentum", 1), ("variant", 0))),
    ],
)
def test_settings_no_run_can_have_are_refused(algorithm: str, constants: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(ConfigError):
        MixingSettings.from_constants(algorithm, constants)
