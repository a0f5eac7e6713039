"""Forecasts of JAX programs on TPU slices, by what the TPU's compiler says of them."""

from engine.forecast.forecasts import Forecast, forecast

__all__ = ["Forecast", "forecast"]
