"""Says in one line that an array or a program did not fit in the memory of a device."""

from __future__ import annotations

import jax

from errors import DeviceError, one_line


def explain(error: BaseException | None) -> DeviceError | None:
    """The mistake that a person can mend, if `error` or one of its causes is a full memory."""
    while error is not None:
        is_of_device = isinstance(error, jax.errors.JaxRuntimeError)
        if is_of_device and str(error).startswith("RESOURCE_EXHAUSTED"):
            who = "; nvidia-smi shows what else uses the GPU" * (jax.default_backend() == "gpu")
            return DeviceError(
                f"the memory of a device is full ({one_line(error)}): use a smaller "
                "--config.train_batch_size, or --config.gradient_accumulation_steps=2 for the same "
                f"batch in parts; --mode=preflight forecasts the memory of TPUs{who}"
            )
        error = error.__cause__
    return None
