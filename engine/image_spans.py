"""Spans of BatchNorm's statistics in images: config.bn_span='64/4096'.

That is as many devices as have 64 of the 4096 images of a forward pass.
"""

from __future__ import annotations

import math
import re

from errors import DeviceError


def group_size(span: str, count: int) -> int:
    """Converts a span to a number of devices; `count` is that of the run.

    Raises:
      DeviceError: the devices cannot be cut into groups of equal size.
    """
    images, total = _images(span)
    groups = total // images
    if count % groups == 0:
        return count // groups
    remedy = f"use a multiple of {groups} devices"
    parts = groups // math.gcd(groups, count)
    if total % (parts * count) == 0:
        remedy += (
            f", or {parts} times as many micro-batches (config.gradient_accumulation_steps) with"
            f" config.bn_span={images}/{total // parts}"
        )
    raise DeviceError(
        f"config.bn_span={span}: {count} devices cannot be {groups} groups of equal size, of"
        f" {images} images each: {remedy}"
    )


def check(span: str, batch_size: int, parts: int) -> None:
    """Refuses a span such as "64/4096" if a forward pass does not have 4096 images.

    Args:
      span: as for `group_size`.
      batch_size: global batch.
      parts: micro-batches of a step, each of which is one forward pass.

    Raises:
      DeviceError: batch_size / parts is another number, or the span is invalid.
    """
    images, total = _images(span)
    if total * parts != batch_size:
        micro = f" / {parts} micro-batches" if parts > 1 else ""
        raise DeviceError(
            f"config.bn_span={span} is of {total} images, but a forward pass has {batch_size}"
            f"{micro}: write {images}/{batch_size // max(1, parts)}"
        )


def _images(span: str) -> tuple[int, int]:
    """Parses "64/4096" into (64, 4096)."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", span)
    images, total = map(int, match.groups()) if match else (0, 0)
    if images < 1 or total < 1 or total % images:
        raise DeviceError(
            f"config.bn_span={span}: write a number of devices, 0 for all devices, or a part of the"
            " images of a forward pass such as 64/4096, where the first number divides the second"
        )
    return images, total
