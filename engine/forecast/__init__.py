"""Forecasts of JAX programs on TPU slices, by what the TPU's compiler says of them."""

try:
    from engine.forecast.forecasts import Forecast, forecast
except ImportError as error:
    if (error.name or "").split(".")[0] != "common":
        raise
    raise ImportError(
        "another package `common` hides this repository's: start "
        "python THIS_REPOSITORY/scripts/forecast.py instead, which works in any folder"
    ) from error

__all__ = ["Forecast", "forecast"]
