"""Where a run's results and data are, and which paths can be used.

Flags, config keys or the environment name them. A path is local, or gs://BUCKET/FOLDER.
"""

import dataclasses
import logging
import os
import re
import uuid

from etils import epath

from common.errors import CheckpointError, ConfigError, one_line

_log = logging.getLogger("tpu_suite")
_WORKDIR_VARIABLES = ("TPU_MODEL_DIR", "PS_MODEL_PATH", "MLP_GCS_MODEL_DIR")
# TensorStore turns a backslash into a slash, and Orbax reads * ? [] as a pattern: checkpoints
# would seem complete and hold no arrays, or another folder's. Control characters break lines of
# logs.
_UNSAFE = re.compile(r"[\\\[\]*?\x00-\x1f\x7f]")


@dataclasses.dataclass(frozen=True)
class Keys:
    """The config's keys that name folders, or the variables that name them."""

    data_dir: str
    data_env: str
    init_from: str
    init_env: str
    data_fallback: str = ""  # where the data are if nothing else says it


def workdir(flag: str | None) -> str:
    """The folder for results: `flag`, the value of --workdir, else the environment."""
    variables = {f"${name}": os.environ.get(name) for name in _WORKDIR_VARIABLES}
    for name, value in {"--workdir": flag, **variables}.items():
        if value:
            _log.info("workdir: %s (from %s)", value, name)
            return check_results_folder(value, name)
    raise ConfigError("where should results go? Give --workdir=DIR or set TPU_MODEL_DIR")


def data_dir(config: Keys) -> str:
    """The folder of the data: the config, else the environment, else the recipe's fallback."""
    if config.data_dir:
        _log.info("data: %s (from --config.data_dir or the recipe)", config.data_dir)
        return check_path(config.data_dir, "--config.data_dir")
    if folder := os.environ.get(config.data_env):
        _log.info("data: %s (from $%s)", folder, config.data_env)
        return check_path(folder, f"${config.data_env}")
    staged = os.environ.get("TPU_MODEL_DIR", "").rstrip("/") + "/input_data"
    if staged != "/input_data" and epath.Path(staged).exists():
        _log.info("data: %s (from $TPU_MODEL_DIR)", staged)
        return staged
    if not (fallback := config.data_fallback):
        variable = f" or set {config.data_env}" if config.data_env else ""
        raise ConfigError(f"where are the data? Give --config.data_dir=DIR{variable}")
    _log.info(
        f"data: {fallback}: WARNING: these are random images, accuracy will mean nothing. Set "
        f"--config.data_dir or ${config.data_env} to train on your own"
    )
    return fallback


def check_path(path: str, source: str, names: tuple[str, ...] = ()) -> str:
    """Returns a path as the libraries take it: gs:// unchanged, a local one with "~" expanded.

    `source` is the flag, config key or variable that it is from, for the message. What begins with
    one of `names` is no path, and unchanged.
    """
    if path.startswith(names) or re.match("gs://[^/]", path):
        return path
    if path.startswith("gs:"):
        bucket = path.removeprefix("gs:").strip("/") or "BUCKET/FOLDER"
        raise ConfigError(f"{source}={path}: a bucket has two slashes: gs://{bucket}")
    if scheme := re.match(r"\w[\w+.-]*://", path):
        raise ConfigError(
            f"{source}={path}: {scheme[0]} is not supported; use a local folder or "
            "gs://BUCKET/FOLDER"
        )
    return os.path.expanduser(path)


def check_results_folder(path: str, source: str) -> str:
    """Returns the folder for results as `check_path` does, a local one as an absolute path.

    ConfigError also for a character that would keep checkpoints from being restored.
    """
    folder = check_path(path, source)
    if is_local := "://" not in folder:
        folder = os.path.abspath(folder)
    if unsafe := _UNSAFE.search(folder):
        raise ConfigError(
            f"{source}={path}: a folder for results cannot have {unsafe[0]!r} in its path, "
            "because checkpoints there could not be restored; choose another name"
        )
    if is_local and any(part.endswith(":") for part in folder.split("/")):
        raise ConfigError(
            f"{source}={path}: a local folder cannot end with ':'; choose another name"
        )
    return folder


def check_file(path: str, flag: str) -> None:
    """Refuses a file that cannot be written, before anything is computed."""
    check_path(path, flag)
    if epath.Path(path).is_dir():
        raise ConfigError(f"{flag}={path} is a folder; name a file in it")
    check_folder(os.path.dirname(path) or ".", flag)


def check_folder(path: str, flag: str = "--workdir") -> None:
    """Makes a folder and writes a file in it, so that a mistake ends the run before it starts."""
    try:
        folder = epath.Path(path)
        if "://" in path and not epath.Path("/".join(path.split("/")[:3])).exists():
            raise FileNotFoundError("there is no such bucket")  # TensorFlow would wait for ever
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write_test.{uuid.uuid4().hex}"  # all hosts do this at once
        probe.write_text("")
        next(folder.iterdir(), None)
        probe.unlink()
    except Exception as error:  # each file system raises its own types
        raise CheckpointError(f"cannot write to {flag}={path}: {one_line(error)}") from error
