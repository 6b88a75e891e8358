"""How far apart trainers may be in theory: contraction factors and the bound on their distance (docs/gossip.md)."""

from __future__ import annotations

from pulsenet.outer.mixing.settings import Job, MixingKind, MixingVariant


def pair_contraction(member_count: int) -> float:
    """Return by what one random matching multiplies the expected squared distance between members.

    ``(M - 2) / (2 (M - 1))`` for an even number of members, 1/2 for an odd one, 0 for one alone.
    """
    assert member_count >= 1
    if member_count == 1:
        return 0.0
    return 0.5 if member_count % 2 else (member_count - 2) / (2 * (member_count - 1))


def contraction(kind: MixingKind, member_count: int) -> float:
    """Return by what a mixing multiplies the expected squared distance between members: 0 mixes all, 1 nothing."""
    if kind is MixingKind.PAIR:
        return pair_contraction(member_count)
    return 0.0 if kind is MixingKind.GLOBAL or member_count == 1 else 1.0


def distance_ratio(
    variant: MixingVariant, member_count: int, *, outer_learning_rate: float, subset_ratio: float = 1.0
) -> float:
    """Return the bound over what inner steps from one common start give: ``1 + a^2 rho2 / (1 - rho1)``.

    Args:
        variant: How the trainers mix.
        member_count: Of the roster (M).
        outer_learning_rate: Of the outer optimiser (a); the bound is for one without momentum.
        subset_ratio: Share of the noise that lies in the subset of Mix2, where the variant mixes one.
    """
    first, second = (contraction(variant.kind(job), member_count) for job in Job)
    if variant.mixes_subset:
        second = subset_ratio * second + (1.0 - subset_ratio)
    if second == 0.0:
        # One mean of all pseudo-gradients moves everyone alike: nothing is left for Mix1 to contract.
        return 1.0
    assert first < 1.0
    return 1.0 + outer_learning_rate**2 * second / (1.0 - first)


def bound_measured(
    variant: MixingVariant, member_count: int, noise_square: float, *, outer_learning_rate: float
) -> float:
    """Return the bound on the mean squared distance after the inner steps, from what those of one round did.

    That is measured, with any inner optimiser; plain SGD gives ``2 eta^2 sigma^2 H`` (learning rate, variance of a
    gradient, steps). What trainers began apart is what the theory adds.

    Args:
        variant: As :func:`distance_ratio`; of a variant that mixes a subset the bound is for the subset.
        member_count: As there.
        noise_square: Mean squared distance between what two trainers' inner steps did, on the tensors of Mix2.
        outer_learning_rate: As there.
    """
    return noise_square * distance_ratio(variant, member_count, outer_learning_rate=outer_learning_rate)
