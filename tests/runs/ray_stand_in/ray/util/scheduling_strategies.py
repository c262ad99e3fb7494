"""Where an actor runs."""

import types


def PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index):  # noqa: N802 - Ray's name
    return types.SimpleNamespace(
        placement_group=placement_group, placement_group_bundle_index=placement_group_bundle_index
    )
