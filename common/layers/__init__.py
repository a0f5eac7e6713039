"""Layers of networks, some of them with another form for each kind of device."""

import jax


def device_kind() -> str:
    """The kind of device that the program is traced for, as "cpu"; "" outside of a mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device else ""
