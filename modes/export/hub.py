"""Sends an export to a repository of the Hugging Face hub, for `--mode=export --push`."""

from __future__ import annotations

import re

from errors import ConfigError, OutputError, one_line


def check(repository: str, formats: tuple[str, ...]) -> None:
    """Refuses, before anything is computed, what cannot be sent.

    Raises:
      ConfigError: `repository` is not OWNER/NAME, the hub knows no login here, or the export has
        no form that the hub's users load.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ConfigError(f"--push={repository}: give OWNER/NAME, a model of the Hugging Face hub")
    if "hf" not in formats:
        raise ConfigError(f"--push={repository} sends the format hf: give --format=hf")
    import huggingface_hub as hub

    try:
        hub.HfApi().whoami()
    except Exception as error:  # huggingface_hub's, and those of the libraries below it
        raise ConfigError(
            f"--push={repository}: the hub knows no login here ({one_line(error)}): "
            "`hf auth login`, or set HF_TOKEN"
        ) from error


def send(folder: str, repository: str) -> str:
    """Makes the repository if it is new, and sends a folder with its card as one commit.

    Returns:
      Its address.

    Raises:
      OutputError: the hub does not take it.
    """
    import huggingface_hub as hub

    try:
        address = hub.HfApi().create_repo(repository, exist_ok=True)
        hub.HfApi().upload_folder(
            folder_path=folder, repo_id=repository, commit_message="Export of a trained model"
        )
    except Exception as error:  # as in `check`
        raise OutputError(f"--push={repository}: the hub refuses it: {one_line(error)}") from error
    return str(address)
